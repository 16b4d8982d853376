"""Write docs/models.md: architectures under the layouts of a trainer, as `regress check model` judges them.

python tests/unit/check/model_table.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from regress.check.architecture_check import ModelCheck, check_model

PAGE = Path(__file__).parents[3] / "docs/models.md"
FAMILIES: dict[str, Callable[[], Any]] = {
    "Qwen2": transformers.Qwen2Config,
    "Qwen3": transformers.Qwen3Config,
    "Qwen3-MoE": transformers.Qwen3MoeConfig,
    "Qwen3-Next": transformers.Qwen3NextConfig,
    "Llama": transformers.LlamaConfig,
    "Mistral": transformers.MistralConfig,
    "Mixtral": transformers.MixtralConfig,
    "Gemma 2": transformers.Gemma2Config,
    "Gemma 3": transformers.Gemma3TextConfig,
    "Phi-3": lambda: transformers.Phi3Config(pad_token_id=0),
    "OLMo 2": transformers.Olmo2Config,
    "Granite": transformers.GraniteConfig,
    "SmolLM3": transformers.SmolLM3Config,
    "GPT-2": transformers.GPT2Config,
    "OPT": transformers.OPTConfig,
}
HEAD = f"""# Architectures under the layouts of a trainer

`regress check model` of transformers {transformers.__version__}: each family with its own defaults, cut to a few
layers, with random weights, in float64 on a CPU. `wrong` is a log-prob or gradient that is not that of the sample
alone; `refused` is an error of the model.

`python tests/unit/check/model_table.py` writes this page.

"""


def checked(family: str) -> ModelCheck:
    """Check a family by its own default configuration."""
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES[family]().save_pretrained(folder)
        return check_model(folder)


def row(family: str, found: ModelCheck) -> str:
    """The row of a family."""
    return f"| {family} | " + " | ".join(one.verdict for one in found.rows) + " |"


if __name__ == "__main__":
    every = {family: checked(family) for family in FAMILIES}
    layouts = [one.layout for one in next(iter(every.values())).rows]
    head = f"| | {' | '.join(layouts)} |\n|{'---|' * (len(layouts) + 1)}\n"
    PAGE.write_text(HEAD + head + "\n".join(row(family, one) for family, one in every.items()) + "\n")
