"""Files of a checkpoint: the commit, what must be there, and that each is what was written.

``trainer_state.json``, which users of Hugging Face's Trainer read, is made again of what the checkpoint knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from regress.doctor.check_context import CheckContext, unsafe, whole
from regress.doctor.checks.weights_check import ADAPTER_CONFIG, in_service, is_adapter
from regress.doctor.doctor_finding import Fix, Issue, Move, Severity, Store, Write, clean, issue, shown
from regress.doctor.file_restore import free_name, restored
from regress.doctor.safe_tree import Missing, Tree, Unreadable, Unsafe, fault, read_manifest
from regress.dump.dump_files import stamp_of
from regress.dump.dump_manifest import MANIFEST
from regress.engine.checkpoint.checkpoint_manifest import READ_SUFFIXES
from regress.engine.checkpoint.checkpoint_names import STATE, TRAINER_STATE, checkpoint_name, parse_name
from regress.engine.checkpoint.trainer_state import (
    READABLE,
    SCHEMA_VERSION,
    json_bytes,
    parse_state,
    trainer_state,
)
from regress.engine.config.config_option import Option
from regress.engine.config.config_schema import Config, options
from regress.errors import RegressError


def check_commit(context: CheckContext) -> Iterator[Issue]:
    """Check that the checkpoint was written to its end: manifest.json is there, readable and safe."""
    path = context.target.file(MANIFEST)
    context.claimed.add(path)
    try:
        commit = read_manifest(context.tree, context.target.checkpoint or "")
    except Missing:
        if not context.foreign:
            yield _incomplete(context, "has no manifest.json, which is written last")
        return
    except Unreadable as error:
        yield issue(
            "corrupted_manifest",
            f"{path} {error}, so no file of the checkpoint can be verified; copy the checkpoint again or take an "
            "earlier one",
            path=path,
        )
        return
    if not commit.complete:
        yield _incomplete(context, "says in manifest.json that it is not complete")
    for name in commit.unsafe[:3]:
        yield issue(
            "unsafe_path",
            f"{path} names the file {shown(name)}, which lies outside of the checkpoint, so nothing was read there; "
            "take the checkpoint from where it was written, or an earlier one",
            path=path,
            evidence={"names": list(commit.unsafe[:20])},
        )


def check_others(context: CheckContext) -> Iterator[Issue]:
    """Find checkpoints of the run whose writer was interrupted; a resume from the latest passes over them."""
    for path in sorted(context.tree.root.glob("checkpoint-*")):
        if path.is_symlink() and parse_name(path.name) is not None:
            yield unsafe(context, path.name, Unsafe(f"is a link to {clean(str(path.readlink()))}"))
    if context.target.named:
        return
    for name in context.target.others:
        if context.tree.exists(f"{name}/{MANIFEST}") or not context.tree.exists(f"{name}/{STATE}"):
            continue
        move = Move(name, free_name(context.tree, f"broken-{name}"))
        yield replace(
            issue(
                "incomplete_checkpoint",
                f"{name} has no manifest.json, which is written last, so its writer was interrupted; a resume takes "
                f"{context.target.checkpoint} instead, and {name} can be moved away",
                path=name,
                fix=Fix(f"move {name} to {move.to}", (move,)),
            ),
            severity=Severity.MEDIUM,
        )


def _incomplete(context: CheckContext, what: str) -> Issue:
    folder = context.target.checkpoint
    return issue(
        "incomplete_checkpoint",
        f"{folder} {what}, so its writer was interrupted; resume from an earlier checkpoint",
        path=folder,
        evidence={
            "holds": [name.removeprefix(f"{folder}/") for name in context.tree.names(folder or "")][:50]
        },
    )


def check_foreign(context: CheckContext) -> Iterator[Issue]:
    """Say so if the checkpoint is another trainer's: it is examined as far as it goes."""
    if not context.foreign:
        return
    context.unchecked.append(
        "hashes, optimizer, curriculum, tracking, environment and configuration: the checkpoint is another "
        "trainer's, which records none of them in a form that is read here; its pickles are not opened"
    )
    folder = context.target.checkpoint
    yield issue(
        "foreign_checkpoint",
        f"{folder} holds no regress_state.json, so another trainer wrote it and a run cannot be continued from it; "
        f"start one from its weights with model.path={folder}",
        path=folder,
    )


def check_required(context: CheckContext) -> Iterator[Issue]:
    """Check that the files are there which every checkpoint has, and that they can be parsed."""
    if context.commit is None and not context.foreign:
        return  # the writer was interrupted, or nothing is known of what should be there
    adapter = is_adapter(context)
    names = [] if in_service(context) else [ADAPTER_CONFIG if adapter else "config.json"]
    if not context.foreign:
        names.append(STATE)
    for name in names:
        yield from _check_json(context, context.target.file(name))


def _check_json(context: CheckContext, path: str) -> Iterator[Issue]:
    try:
        context.tree.object(path)
    except Unreadable as error:
        context.claimed.add(path)
        yield unreadable(context, path, error, "corrupted_checkpoint_file")


def unreadable(context: CheckContext, path: str, error: Unreadable, type: str) -> Issue:
    """Return the finding for a file that is missing, unsafe or damaged; `type` is that of a damaged one."""
    if isinstance(error, Missing):
        type = "missing_checkpoint_file"
    elif isinstance(error, Unsafe):
        type = "unsafe_path"
    return issue(
        type,
        f"{clean(path)} {error}; copy the checkpoint again or take an earlier one",
        path=path,
        fix=restored(context, path),
    )


def check_schema(context: CheckContext) -> Iterator[Issue]:
    """Check that this release can read regress_state.json, and that it belongs to this folder."""
    if not context.state:
        return
    version, path = context.state.get("schema_version"), context.target.file(STATE)
    if version not in READABLE:
        context.unchecked.append(f"the content of {path}: its schema is unknown to this release")
        yield issue(
            "unsupported_schema",
            f"{path} is of schema version {shown(version)}, and this release reads {SCHEMA_VERSION}; resume with the "
            "release that wrote it",
            path=path,
            evidence={"schema_version": version},
        )
        return
    if context.step is None or context.update is None:
        yield issue(
            "corrupted_checkpoint_file",
            f"{path} tells no step and update as whole numbers; take an earlier checkpoint",
            path=path,
        )
        return
    yield from _check_name(context)


def _check_name(context: CheckContext) -> Iterator[Issue]:
    step = parse_name(context.target.checkpoint or "")
    within = whole(context.state.get("updates_in_step", 0)) or 0
    true = checkpoint_name(context.step or 0, within)
    if step is None or true == context.target.checkpoint:
        return
    free = not context.tree.exists(true)
    remedy = "rename it" if free else f"{true} exists, so move this one away"
    move = Move(context.target.checkpoint or "", true)
    yield issue(
        "checkpoint_misnamed",
        f"{context.target.checkpoint} was made after {context.step} steps and {within} updates of the next, so it is "
        f"{true}, and choosing the latest checkpoint would go wrong; {remedy}",
        path=context.target.checkpoint,
        evidence={"step": context.step, "updates_in_step": within, "name": context.target.checkpoint},
        fix=Fix(f"rename {move.path} to {move.to}", (move,)) if free else None,
    )


def check_contents(context: CheckContext) -> Iterator[Issue]:
    """Check every file against the manifest, and the folder for links that lead out of it; runs last."""
    folder, commit = context.target.checkpoint or "", context.commit
    listed = {} if commit is None else commit.files
    for name, stamp in sorted(listed.items()):
        path = f"{folder}/{name}"
        if path in context.claimed:
            continue
        try:
            found = fault(context.tree, folder, name, stamp, deep=context.deep)
        except Unreadable as error:
            yield unreadable(context, path, error, "checksum_mismatch")
        else:
            if found is not None:
                yield issue(
                    "checksum_mismatch",
                    f"{clean(path)} {found}, as manifest.json tells; copy the checkpoint again or take an earlier one",
                    path=path,
                    evidence={"size": stamp.size, "sha256": stamp.sha256},
                    fix=restored(context, path),
                )
        context.claimed.add(path)
    yield from _unlisted(context, folder, {f"{folder}/{name}" for name in listed})


def _unlisted(context: CheckContext, folder: str, listed: set[str]) -> Iterator[Issue]:
    for path in context.tree.names(folder):
        if path in listed or path in context.claimed:
            continue
        reason = _unsafe(context.tree, path)
        if reason is not None:
            yield issue(
                "unsafe_path",
                f"{clean(path)} {reason}, so it is not read; remove it, or put the file itself there",
                path=path,
            )
        elif listed and not path.rpartition("/")[2].startswith(".partial-"):
            yield _stranger(path)


def _stranger(path: str) -> Issue:
    """Return the finding for a file that the manifest does not know; some would change what is loaded."""
    name = PurePosixPath(path).name
    if PurePosixPath(path).suffix in READ_SUFFIXES and not name.startswith("."):
        return issue(
            "unlisted_file",
            f"{clean(path)} is not in manifest.json and could change what is loaded, so a resume refuses the "
            "checkpoint; a repair moves it away",
            path=path,
            fix=Fix(f"move {clean(path)} into a backup", (Store(path),)),
        )
    return replace(
        issue(
            "unlisted_file",
            f"{clean(path)} is not in manifest.json, and a resume does not read it; nothing has to be done",
            path=path,
        ),
        severity=Severity.LOW,
    )


def _unsafe(tree: Tree, path: str) -> str | None:
    try:
        tree.size(path)
    except Unsafe as error:
        return str(error)
    except Unreadable:
        return None
    return None


def saved_config(saved: Mapping[str, Any]) -> Config:
    """Return the configuration of dotted keys and plain values; keys that are missing have their defaults.

    Raises:
        ValueError: if a value is not of its key's type.
    """
    config = Config()
    for key, leaf in options().items():
        if leaf.kind is dict:
            value: Any = {
                name.removeprefix(f"{key}."): item
                for name, item in saved.items()
                if name.startswith(f"{key}.")
            }
            if not value and saved.get(key) != "{}":
                continue
        elif key in saved:
            value = _value(leaf, saved[key])
        else:
            continue
        section: Any = config
        for name in leaf.path[:-1]:
            section = getattr(section, name)
        setattr(section, leaf.path[-1], value)
    return config


def _value(leaf: Option, text: Any) -> Any:
    """Return a value of `regress.engine.config.flat`, which writes null, lists and empty mappings as JSON."""
    value = text
    if isinstance(text, str) and (leaf.kind is not str or (leaf.optional and text == "null")):
        value = json.loads(text)
    if value is None and leaf.optional:
        return None
    kinds: Any = {int: int, float: (int, float), bool: bool, str: str, list: list}.get(leaf.kind, object)
    if not isinstance(value, kinds) or (isinstance(value, bool) and leaf.kind is not bool):
        raise ValueError(f"{leaf.key} is {text!r}")
    return value


KEYS = ("global_step", "epoch", "max_steps", "log_history", "best_metric", "best_model_checkpoint")


def check_trainer_state(context: CheckContext) -> Iterator[Issue]:
    """Check that trainer_state.json is there, complete, and of the checkpoint's step."""
    if context.commit is None and not context.foreign:
        return
    path = context.target.file(TRAINER_STATE)
    try:
        content = context.tree.json(path)
    except Unreadable as error:
        context.claimed.add(path)
        type = "corrupted_checkpoint_file"
        if isinstance(error, Missing):
            type = "missing_checkpoint_file"
        elif isinstance(error, Unsafe):
            type = "unsafe_path"
        yield _finding(context, type, f"{path} {error}", {})
        return
    if not isinstance(content, dict):
        context.claimed.add(path)
        yield _finding(context, "trainer_state_read_error", f"{path} holds no JSON object", {})
        return
    missing = [key for key in KEYS if key not in content]
    if missing:
        context.claimed.add(path)
        yield _finding(
            context, "incomplete_trainer_state", f"{path} lacks {', '.join(missing)}", {"missing": missing}
        )
    if "global_step" in content:
        yield from _check_step(context, path, content)


def _check_step(context: CheckContext, path: str, content: Mapping[str, Any]) -> Iterator[Issue]:
    step = content["global_step"]
    known = whole(step)
    evidence = {"global_step": step, "update": context.update, "step": content.get("step")}
    if known is None or (known == 0 and context.update != 0):
        text = (
            f"{path} says global_step {shown(step)}, which no checkpoint of a run that has trained can have"
        )
    elif context.update is not None and known != context.update:
        text = f"{path} says global_step {known}, and regress_state.json counts {context.update} updates"
    elif context.step is not None and content.get("step", context.step) != context.step:
        text = (
            f"{path} says step {shown(content['step'])}, and regress_state.json counts {context.step} steps"
        )
    else:
        return
    context.claimed.add(path)
    yield _finding(context, "invalid_global_step", text, evidence)


def _finding(context: CheckContext, type: str, text: str, evidence: Mapping[str, Any]) -> Issue:
    path = context.target.file(TRAINER_STATE)
    fix = None
    remedy = "copy the checkpoint again"
    data = rebuilt(context)
    if data is not None:
        fix = Fix(f"make {path} again of regress_state.json", (Write(path, data, seal=True),))
        remedy = "it can be made again of regress_state.json"
    return issue(type, f"{text}; {remedy}", path=path, evidence=evidence, fix=fix)


def rebuilt(context: CheckContext) -> bytes | None:
    """Return trainer_state.json as the run wrote it, or None where its state cannot be read.

    The manifest tells whether the number of problems in an epoch, which no other file holds, was guessed well.
    """
    if context.commit is None or context.target.checkpoint is None or not context.state:
        return None
    try:
        state = parse_state(context.tree.root / context.target.checkpoint)
        config = saved_config(state.config)
        own = [] if config.task.dataset_path is not None else [config.task.train_size]
        guesses = [*_problems(context, config.data.prompts_per_step), *own, None]
        found = [json_bytes(trainer_state(config, state, problems)) for problems in guesses]
    except (RegressError, ValueError, TypeError, ArithmeticError):
        return None
    stamp = context.commit.files.get(TRAINER_STATE)
    return next((data for data in found if stamp_of(data) == stamp), found[0])


def _problems(context: CheckContext, prompts_per_step: int) -> Iterator[int]:
    """Return the problems in an epoch as other checkpoints of the run imply them."""
    for name in context.target.others:
        try:
            other = context.tree.object(f"{name}/{TRAINER_STATE}")
        except Unreadable:
            continue
        step, epoch = other.get("step"), other.get("epoch")
        if isinstance(step, int) and isinstance(epoch, float) and 0 < epoch < 1e9 and step > 0:
            yield max(1, round(step * prompts_per_step / epoch))
