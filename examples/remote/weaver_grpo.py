"""GRPO through Weaver's SDK (pip install nex-weaver) on the service of this machine.

GRPO_REGRESS_API_KEY=tml-local regress serve --config-name reverse_string
WEAVER_BASE_URL=http://127.0.0.1:8000 WEAVER_API_KEY=tml-local NO_PROXY=127.0.0.1 python examples/remote/weaver_grpo.py
"""

from weaver import ServiceClient, types

service = ServiceClient()  # WEAVER_BASE_URL and WEAVER_API_KEY
service.connect()
base = service.list_supported_models()[0]
model = service.create_model(base_model=base, training_mode="full_ft")
tokenizer = model.get_tokenizer()
prompt = tokenizer("ab").input_ids
wanted = tokenizer("a", add_special_tokens=False).input_ids[0]
adam = types.AdamParams(learning_rate=3e-3, weight_decay=0.0, grad_clip_norm=1.0)
config = {"enable_debug_dump": False}

for step in range(10):
    path = model.save_weights_for_sampler(name=f"step_{step:06d}")
    sampler = service.create_sampling_client(model_path=path, base_model=base, model_id=model.model_id)
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=step)
    text = types.ModelInput.from_ints(prompt)
    group = sampler.sample(prompt=text, num_samples=16, sampling_params=params, wait=True)["sequences"]
    rewards = [one["tokens"].count(wanted) / len(one["tokens"]) for one in group]
    mean = sum(rewards) / len(rewards)
    data = []
    for one, reward in zip(group, rewards, strict=True):
        tokens, free = prompt + one["tokens"], len(prompt) - 1
        mask = [0.0] * free + [1.0] * len(one["tokens"])
        inputs = {"target_tokens": tokens[1:], "loss_mask": mask}
        inputs["logprobs"] = [0.0] * free + one["logprobs"]
        inputs["advantages"] = [(reward - mean) * kept for kept in mask]
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    model.forward_backward(data, "importance_sampling", loss_fn_config=config, wait=True)
    model.optim_step(adam, wait=True)
    print(f"step {step}: mean reward {mean:.3f}")
service.close()
