"""Faults and harmless changes of released trainers, planted around one cell each.

From the root of the repository, a plant by itself::

    PYTHONPATH=tests/systems regress systems run trl --cell '*/tools' --plant plants.trl:tool_tokens_trained

and all of them, with what was found of each::

    PYTHONPATH=tests/systems python -m plants [SYSTEM]...
"""
