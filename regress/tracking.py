"""Tracking and evaluation for a training loop of one's own: metrics that survive resumes, trackers that cannot fail it.

>>> from regress.tracking import initialize_wandb_sync_manager, safe_wandb_log
>>> manager = initialize_wandb_sync_manager(output_dir="output", project_name="project", run_name="run")
>>> safe_wandb_log({"loss": 0.5}, 3)
True
"""

from __future__ import annotations

from regress.engine.evaluation_callback import EnhancedInferenceCallback
from regress.engine.tracking.tracking_functions import (
    WandBSyncManager,
    get_wandb_sync_manager,
    initialize_wandb_sync_manager,
    safe_wandb_log,
    update_step_offset,
)

__all__ = [
    "EnhancedInferenceCallback",
    "WandBSyncManager",
    "get_wandb_sync_manager",
    "initialize_wandb_sync_manager",
    "safe_wandb_log",
    "update_step_offset",
]
