"""Files of a run in its output directory: those of an earlier run stay until this one has ended well."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from regress.engine.adapters.save import save_model
from regress.errors import RegressError, reason

METRICS, FINAL = "metrics.jsonl", "final"
LIVE_METRICS, UNFINISHED, REPLACED = "metrics.partial.jsonl", "final.partial", "final.replaced"


class Outputs(AbstractContextManager["Outputs"]):
    """Writer of ``metrics.jsonl`` and the model in ``final/``.

    During the run the metrics are in ``metrics.partial.jsonl``. Leaving the context renames the files,
    replacing those of an earlier run; an exception leaves the earlier files and the partial metrics
    unchanged.

    Raises:
        RegressError: if the directory cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._errors():
            folder.mkdir(parents=True, exist_ok=True)
            for name, fits in ((METRICS, Path.is_file), (FINAL, Path.is_dir)):
                if (folder / name).exists() and not fits(folder / name):
                    raise RegressError(
                        f"{folder / name} is not what a run writes under this name; move it away or choose another "
                        "output_dir"
                    )
            probe = folder / f".{LIVE_METRICS}"
            probe.touch()
            probe.unlink()
        self._metrics: TextIO | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line of strict JSON, flushed as it is written; values that are not finite are null."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        with self._errors():
            if self._metrics is None:  # only now: a refused run leaves the files of an earlier one alone
                self._metrics = (self.folder / LIVE_METRICS).open("w")
            self._metrics.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
            self._metrics.flush()

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, merged: bool = False
    ) -> None:
        """Save model and tokenizer as ``save_pretrained`` does, and with ``merged`` an adapter merged into its model.

        Raises:
            RegressError: also for a weight that is not finite.
        """
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise RegressError(
                    f"{name} holds values that are not finite, so the model is not saved; lower the learning rates or "
                    "raise optimizer.eps"
                )
        unfinished = self.folder / UNFINISHED
        with self._errors():
            shutil.rmtree(unfinished, ignore_errors=True)
            save_model(model, unfinished, home=self.folder / FINAL, merged=merged)
            tokenizer.save_pretrained(unfinished)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._metrics is not None:
            with suppress(OSError):  # every line was flushed, or its failure reported
                self._metrics.close()
        if kind is not None:
            shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)
            return
        with self._errors():
            if (self.folder / UNFINISHED).is_dir():
                self._publish_model()
            if self._metrics is not None:
                (self.folder / LIVE_METRICS).replace(self.folder / METRICS)
            else:
                (self.folder / METRICS).write_text("")

    def _publish_model(self) -> None:
        final, replaced = self.folder / FINAL, self.folder / REPLACED
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        (self.folder / UNFINISHED).rename(final)
        shutil.rmtree(replaced, ignore_errors=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            told = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
            raise RegressError(
                f"output_dir={str(self.folder)!r} cannot be written ({told}); free space there or choose another "
                "output_dir"
            ) from error
