"""Errors of the engine as the service tells them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from regress.errors import CheckpointError, DumpError, NotFinite, RankError, RegressError, reason
from regress.service.api import ServiceError


@contextmanager
def told() -> Iterator[None]:
    """Raise the engine's errors as `ServiceError`: those that another request helps against, and the others."""
    try:
        yield
    except ServiceError:
        raise
    except RankError as error:
        raise ServiceError(str(error), code="rank_failed", category="server") from error
    except NotFinite as error:
        raise ServiceError(str(error), code="not_finite") from error
    except CheckpointError as error:
        raise ServiceError(str(error), code="bad_save") from error
    except DumpError as error:
        raise ServiceError(str(error), code="dump_failed", category="server") from error
    except RegressError as error:
        raise ServiceError(str(error)) from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ServiceError(
            f"the memory of the service does not suffice ({reason(error)}); send fewer or shorter datums in a request",
            code="out_of_memory",
            category="server",
        ) from error
