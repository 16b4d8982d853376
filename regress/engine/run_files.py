"""Files of a run in its output directory: those of an earlier run stay until this one has ended well."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from regress.dump.metrics_file import METRICS
from regress.durable_files import publish, recover
from regress.engine.adapters.model_files import save_model
from regress.engine.tracking.tracker_state import STATE
from regress.errors import RegressError, reason

FINAL, UNFINISHED = "final", "final.partial"


class Outputs(AbstractContextManager["Outputs"]):
    """Writer of the model in ``final/``.

    Leaving the context renames the directory, replacing that of an earlier run; an exception leaves the earlier one
    unchanged.

    Raises:
        RegressError: if the directory cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            recover(folder, (FINAL, METRICS, STATE).__contains__, Path.is_dir)
            for name, fits in ((METRICS, Path.is_file), (FINAL, Path.is_dir)):
                if (folder / name).exists() and not fits(folder / name):
                    raise RegressError(f"""{folder / name} is not what a run writes under this name; move it away or
                    choose another output_dir""")
            probe = folder / f".{METRICS}"
            probe.touch()
            probe.unlink()

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, merged: bool = False
    ) -> None:
        """Save model and tokenizer as ``save_pretrained`` does, and with ``merged`` an adapter merged into its model.

        Raises:
            RegressError: also for a weight that is not finite.
        """
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise RegressError(f"""{name} holds values that are not finite, so the model is not saved; lower the
                learning rates or raise optimizer.eps""")
        unfinished = self.folder / UNFINISHED
        with writing(self.folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            save_model(model, unfinished, home=self.folder / FINAL, merged=merged)
            tokenizer.save_pretrained(unfinished)

    def save_elsewhere(self, facts: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
        """Save the tokenizer of a model that lies in a service, and in ``service.json`` what says where it is."""
        unfinished = self.folder / UNFINISHED
        with writing(self.folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            (unfinished / "service.json").write_text(json.dumps(dict(facts), indent=2) + "\n")
            tokenizer.save_pretrained(unfinished)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)
            return
        with writing(self.folder):
            if (self.folder / UNFINISHED).is_dir():
                publish(self.folder / UNFINISHED, self.folder / FINAL)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what fails when files in ``output_dir`` are written into one sentence.

    Raises:
        RegressError: in place of errors of the file system.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
        raise RegressError(
            f"output_dir={str(folder)!r} cannot be written ({why}); free space there or choose another output_dir"
        ) from error
