"""GRPO through Tinker's SDK (pip install tinker) on the service of this machine.

GRPO_REGRESS_API_KEY=tml-local regress serve --config-name reverse_string
TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local NO_PROXY=127.0.0.1 python examples/remote/tinker_grpo.py
"""

import tinker
from tinker import types

service = tinker.ServiceClient()  # TINKER_BASE_URL and TINKER_API_KEY
base = service.get_server_capabilities().supported_models[0].model_name
made = service.create_lora_training_client(base_model=base, rank=0)  # rank 0: all parameters
model = made.result() if hasattr(made, "result") else made
tokenizer = model.get_tokenizer()
prompt = tokenizer("ab").input_ids
wanted = tokenizer("a", add_special_tokens=False).input_ids[0]
adam = types.AdamParams(learning_rate=3e-3, weight_decay=0.0, grad_clip_norm=1.0)

for step in range(10):
    path = model.save_weights_for_sampler(name=f"step_{step:06d}").result().path
    sampler = service.create_sampling_client(model_path=path)
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=step)
    text = types.ModelInput.from_ints(prompt)
    group = sampler.sample(prompt=text, num_samples=16, sampling_params=params).result().sequences
    rewards = [one.tokens.count(wanted) / len(one.tokens) for one in group]
    mean = sum(rewards) / len(rewards)
    data = []
    for one, reward in zip(group, rewards, strict=True):
        tokens, free = prompt + list(one.tokens), len(prompt) - 1
        inputs = {"target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])}
        advantages = [0.0] * free + [reward - mean] * len(one.tokens)
        for name, values in (("logprobs", [0.0] * free + list(one.logprobs)), ("advantages", advantages)):
            inputs[name] = types.TensorData(data=values, dtype="float32", shape=[len(values)])
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    pending = model.forward_backward(data, "importance_sampling")
    model.optim_step(adam).result()
    print(f"step {step}: mean reward {mean:.3f}, loss {pending.result().metrics['loss:sum']:.3f}")
