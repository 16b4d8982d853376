"""State of a remote run that its service keeps: saves of the model, and the weights of the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regress.errors import CheckpointError
from regress.service.api import ServiceError
from regress.service.client.backend import RemoteModel, RemoteSampler


class ServiceState:
    """Saves of a run's model in its service, and the weights that its reference samples from.

    Attributes:
        model: the model that is trained.
    """

    def __init__(self, model: RemoteModel) -> None:
        self.model = model
        self._reference: str | None = None
        self._sampler: RemoteSampler | None = None

    def reference(self) -> RemoteSampler:
        """Return the sampler of the weights before the first update, which are exported when first asked for."""
        if self._reference is None:
            self._reference = self.model.export("reference")
        if self._sampler is None:
            self._sampler = self.model.sampler(self._reference)
        return self._sampler

    def save(self, name: str) -> dict[str, Any]:
        """Save weights and optimizer in the service, and return where they are, for a checkpoint of the run."""
        return {**self._saved(name, optimizer=True), "reference": self._reference}

    def finish(self) -> dict[str, Any]:
        """Save the final weights in the service, and return where they are."""
        return self._saved("final", optimizer=False)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` has returned.

        Raises:
            CheckpointError: if it is of another protocol or base model.
            ServiceError: if the service does not have it.
        """
        opened = self.model.opened
        for name, now in (("wire", self.model.wire), ("base_model", opened.base_model)):
            if saved.get(name) != now:
                raise CheckpointError(
                    f"the weights of the checkpoint lie in a service, saved with {name}={saved.get(name)!r}, and this "
                    f"run has {name}={now!r}; go on with the service that saved them"
                )
        try:
            self.model.load(str(saved["path"]))
        except ServiceError as error:
            raise ServiceError(
                f"the service does not give back the save {str(saved['path']).rpartition('/')[2]} of the model "
                f"{saved.get('model_id')} ({error}); go on with the service, its state directory and the API key that "
                "saved it",
                code=error.code,
                category=error.category,
            ) from error
        reference = saved.get("reference")
        self._reference, self._sampler = None if reference is None else str(reference), None

    def _saved(self, name: str, *, optimizer: bool) -> dict[str, Any]:
        path = self.model.save(name, optimizer=optimizer)
        opened = self.model.opened
        told = {"wire": self.model.wire, "model_id": opened.model_id, "base_model": opened.base_model}
        return {**told, "path": path}
