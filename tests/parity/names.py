"""Settings of TRL's and verl's configuration classes, and what expresses each of them here.

The names are read from the packages: fields from the dataclasses, and the texts that a setting may take from the code
that compares with them. So a name that a newer release adds is in none of these tables, and a test fails.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

NOT_THE_OBJECTIVE = ""
"""Value of a setting that says how completions are sampled, work is laid out or logs are written."""

TRL: dict[str, str] = {
    "beta": "algorithm.kl_coef",
    "num_iterations": "trainer.epochs",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.delta",
    "sapo_temperature_neg": "algorithm.sapo_tau_neg",
    "sapo_temperature_pos": "algorithm.sapo_tau_pos",
    "vespo_k_pos": "algorithm.vespo_k_pos",
    "vespo_lambda_pos": "algorithm.vespo_lambda_pos",
    "vespo_k_neg": "algorithm.vespo_k_neg",
    "vespo_lambda_neg": "algorithm.vespo_lambda_neg",
    "importance_sampling_level": "algorithm.importance_level",
    "reward_weights": "task.rewards",
    "multi_objective_aggregation": "algorithm.reward_aggregation",
    "scale_rewards": "algorithm.scale",
    "loss_type": "algorithm.loss",
    "mask_truncated_completions": "algorithm.mask_truncated_completions",
    "sync_ref_model": "reference.sync_every_n_steps",
    "ref_model_sync_steps": "reference.sync_every_n_steps",
    "ref_model_mixup_alpha": "reference.mixup_alpha",
    "top_entropy_quantile": "algorithm.top_entropy_quantile",
    "entropy_coef": "algorithm.entropy_coef",
    "use_adaptive_entropy": "algorithm.entropy_controller",
    "entropy_coef_min": "algorithm.entropy_coef_min",
    "entropy_coef_max": "algorithm.entropy_coef_max",
    "entropy_coef_delta": "algorithm.entropy_coef_delta",
    "entropy_target": "algorithm.entropy_target",
    "vllm_importance_sampling_correction": "algorithm.sampler_correction",
    "vllm_importance_sampling_mode": "algorithm.sampler_correction",
    "vllm_importance_sampling_clip_max": "algorithm.correction_max",
    "vllm_importance_sampling_clip_min": "algorithm.correction_min",
    "vllm_importance_sampling_cap": "algorithm.correction_max",
    "off_policy_mask_threshold": "algorithm.off_policy_threshold",
    "use_bias_correction_kl": "algorithm.kl_bias_correction",
    "normalize_advantages": "algorithm.normalize_advantages",
    "reward_clip_range": "algorithm.reward_max",
    "router_aux_loss_coef": "model.router_coef",
    "num_generations": "data.group_size",
    "max_completion_length": "data.max_completion_length",
    "temperature": "rollout_worker.temperature",
    "top_p": "rollout_worker.top_p",
    "top_k": "rollout_worker.top_k",
    "generation_batch_size": "trainer.mini_batch_size",
    "steps_per_generation": "trainer.mini_batch_size",
} | dict.fromkeys(
    (
        "model_init_kwargs",
        "trust_remote_code",
        "disable_dropout",  # there is none here
        "cast_lm_head_to_fp32",
        "num_generations_eval",
        "ds3_gather_for_generation",
        "shuffle_dataset",
        "pad_to_multiple_of",
        "min_p",
        "generation_kwargs",
        "chat_template_kwargs",
        "repetition_penalty",
        "cache_implementation",
        "use_vllm",
        "vllm_mode",
        "vllm_model_impl",
        "vllm_enable_sleep_mode",
        "vllm_structured_outputs_regex",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_group_port",
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_tensor_parallel_size",
        "max_tool_calling_iterations",
        "log_completions",
        "log_multimodal",
        "num_completions_to_print",
        "log_unique_prompts",
        "log_completions_hub_repo",
        "use_transformers_continuous_batching",
        "transformers_continuous_batching_config",
        "use_transformers_paged",
    ),
    NOT_THE_OBJECTIVE,
)
"""Own fields of ``GRPOConfig`` and ``RLOOConfig``, those of ``TrainingArguments`` apart."""

VERL: dict[str, str] = {
    "AlgoConfig.gamma": "algorithm.gamma",
    "AlgoConfig.lam": "algorithm.lam",
    "AlgoConfig.adv_estimator": "algorithm.advantage",
    "AlgoConfig.norm_adv_by_std_in_grpo": "algorithm.scale",
    "AlgoConfig.use_kl_in_reward": "algorithm.kl_placement",
    "AlgoConfig.kl_penalty": "algorithm.kl_estimator",
    "AlgoConfig.kl_ctrl": "algorithm.kl_controller",
    "AlgoConfig.use_pf_ppo": "trainer.resampling",
    "AlgoConfig.pf_ppo": "trainer.resampling_power",
    "AlgoConfig.filter_groups": "data.filter_groups",
    "AlgoConfig.rollout_correction": "algorithm.sampler_correction",
    "AlgoConfig.gdpo_reward_keys": "task.rewards",
    "AlgoConfig.gdpo_reward_weights": "task.rewards",
    "FilterGroupsConfig.enable": "data.filter_groups",
    "FilterGroupsConfig.metric": "data.filter_metric",
    "FilterGroupsConfig.max_num_gen_batches": "data.max_generation_batches",
    "FilterGroupsConfig.max_inflight_gen_batches": NOT_THE_OBJECTIVE,
    "KLControlConfig.type": "algorithm.kl_controller",
    "KLControlConfig.kl_coef": "algorithm.kl_coef",
    "KLControlConfig.horizon": "algorithm.kl_horizon",
    "KLControlConfig.target_kl": "algorithm.kl_target",
    "RolloutCorrectionConfig.rollout_is": "algorithm.sampler_correction",
    "RolloutCorrectionConfig.rollout_is_threshold": "algorithm.correction_max",
    "RolloutCorrectionConfig.rollout_is_batch_normalize": "algorithm.correction_normalize",
    "RolloutCorrectionConfig.rollout_rs": "algorithm.rejection",
    "RolloutCorrectionConfig.rollout_rs_threshold": "algorithm.rejection",
    "RolloutCorrectionConfig.bypass_mode": "algorithm.old_log_probs",
    "RolloutCorrectionConfig.loss_type": "algorithm.loss",
    "ActorConfig.ppo_mini_batch_size": "trainer.mini_batch_size",
    "ActorConfig.clip_ratio": "algorithm.clip_low",
    "ActorConfig.clip_ratio_low": "algorithm.clip_low",
    "ActorConfig.clip_ratio_high": "algorithm.clip_high",
    "ActorConfig.clip_ratio_c": "algorithm.dual_clip",
    "ActorConfig.policy_loss": "algorithm.loss",
    "ActorConfig.loss_agg_mode": "algorithm.aggregation",
    "ActorConfig.loss_scale_factor": "algorithm.norm_length",
    "ActorConfig.entropy_coeff": "algorithm.entropy_coef",
    "ActorConfig.tau_pos": "algorithm.sapo_tau_pos",
    "ActorConfig.tau_neg": "algorithm.sapo_tau_neg",
    "ActorConfig.use_kl_loss": "algorithm.kl_placement",
    "ActorConfig.kl_loss_coef": "algorithm.kl_coef",
    "ActorConfig.kl_loss_type": "algorithm.kl_estimator",
    "ActorConfig.ppo_epochs": "trainer.epochs",
    "ActorConfig.rollout_n": "data.group_size",
    "PolicyLossConfig.loss_mode": "algorithm.loss",
    "PolicyLossConfig.clip_cov_ratio": "algorithm.cov_fraction",
    "PolicyLossConfig.clip_cov_lb": "algorithm.cov_low",
    "PolicyLossConfig.clip_cov_ub": "algorithm.cov_high",
    "PolicyLossConfig.kl_cov_ratio": "algorithm.cov_fraction",
    "PolicyLossConfig.ppo_kl_coef": "algorithm.cov_kl_coef",
    "PolicyLossConfig.dro_beta": "algorithm.dro_beta",
    "PolicyLossConfig.rollout_correction": "algorithm.sampler_correction",
} | dict.fromkeys(
    (
        "ActorConfig.strategy",
        "ActorConfig.ppo_micro_batch_size",
        "ActorConfig.ppo_micro_batch_size_per_gpu",
        "ActorConfig.ppo_infer_micro_batch_size_per_gpu",
        "ActorConfig.use_dynamic_bsz",
        "ActorConfig.ppo_max_token_len_per_gpu",
        "ActorConfig.ppo_infer_max_token_len_per_gpu",
        "ActorConfig.freeze_vision_tower",
        "ActorConfig.calculate_entropy",
        "ActorConfig.calculate_sum_pi_squared",
        "ActorConfig.use_prefix_grouper",
        "ActorConfig.use_torch_compile",
        "ActorConfig.shuffle",
        "ActorConfig.data_loader_seed",
        "ActorConfig.checkpoint",
        "ActorConfig.optim",
        "ActorConfig.use_fused_kernels",
        "ActorConfig.profiler",
        "ActorConfig.engine",
        "ActorConfig.model_config",
        "ActorConfig.global_batch_info",
        "ActorConfig.qat",
    ),
    NOT_THE_OBJECTIVE,
)
"""Fields of verl's configuration classes, ``_target_`` apart."""

KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""verl's KL estimator -> ours."""

LEFT_OUT: dict[str, str] = {
    "verl advantage=gae": "it needs the values of a critic; a pure function on recorded values",
    "verl advantage=remax": "it needs a greedy completion of each prompt; a pure function on recorded rewards",
    "verl advantage=optimal_token_baseline": "it needs the squared probabilities of the whole vocabulary before the "
    "update; a pure function on recorded values",
    "verl advantage=tir_optimal_token_baseline": "as optimal_token_baseline; a pure function on recorded values",
    "verl kl=full": "it needs the reference's logits of the whole vocabulary; verl itself raises NotImplementedError",
}
"""Names that a training step of this package has not, with the model or service that each needs: at most 5."""


def compared_texts(owner: Any, attribute: str | None = None) -> set[str]:
    """Return the texts that the code of a class or function compares with, of one attribute or of all.

    ``self.loss_type in ["a", "b"]`` and ``args.loss_type == "c"`` give a, b and c for ``loss_type``.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner)))):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        named = {one.attr for one in sides if isinstance(one, ast.Attribute)}
        if attribute is not None and attribute not in named:
            continue
        constants = [each for one in sides for each in ast.walk(one) if isinstance(each, ast.Constant)]
        found |= {each.value for each in constants if isinstance(each.value, str)}
    return found


def unknown(package: str, what: str, found: Iterable[str], known: Iterable[str]) -> str:
    """Return one sentence about the names that a package has and these tables have not, and the reverse; or nothing."""
    found, known = set(found), set(known)
    if added := sorted(found - known):
        return (
            f"{package} has the {what} {', '.join(added)}, which nothing here expresses or leaves out with a reason: "
            "add it to the objective, or to the tables of tests/parity/names.py."
        )
    if gone := sorted(known - found):
        return f"{package} has the {what} {', '.join(gone)} no more: take it out of the presets and tables."
    return ""


def own_keys(settings: Iterable[Mapping[str, Any]], name: str, default: str) -> set[str]:
    """Return the values that some settings give a name."""
    return {str(one.get(name, default)) for one in settings}
