"""Command ``regress serve``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from regress.choice_option import Choice
from regress.errors import ConfigError
from regress.golden.golden_options import code_option
from regress.service.core.service_limits import FORMATS, Limits
from regress.service.wires.app_settings import Limits as RequestLimits

if TYPE_CHECKING:
    from regress.engine.config.config_schema import Config

_LIMITS: dict[str, str] = {
    "operation_timeout": "Seconds that one operation may run.",
    "hole_timeout": "Seconds to wait for a missing seq_id before those that wait for it fail.",
    "queue_length": "Operations of one model that may wait.",
    "queue_bytes": "Bytes of all requests that may wait.",
    "results_bytes": "Bytes of results that are kept; while as many are unread, requests are refused.",
    "models": "Models that may be open at the same time.",
    "samplers": "Samplers whose weights are in memory at the same time.",
    "sessions": "Sessions that may be open at the same time.",
    "result_ttl": "Seconds for which a result that nobody reads is kept.",
    "session_ttl": "Seconds without a sign of life after which a client's models are closed.",
}

_REQUEST_LIMITS: dict[str, str] = {
    "body_bytes": "Bytes of a request's body as it is sent.",
    "expanded_bytes": "Bytes of a body after zstd is undone.",
    "held_bytes": "Bytes of all bodies that are held at once; further clients wait.",
    "body_seconds": "Seconds in which a body must arrive.",
    "data": "Datums of a request.",
    "tokens": "Tokens of a request: those of all datums, or of a prompt times the completions.",
    "tensor_elements": "Elements of a tensor, as its shape says.",
    "samples": "Completions of a sampling request.",
    "connections": "Connections at one moment; beyond them the answer is 503.",
    "answer_seconds": "Seconds that a request waits for its operation before it is answered as pending.",
    "poll_seconds": "Seconds that a poll waits for the end of an operation.",
}

_OPTIONS = {
    "models": "open_models",
    "samplers": "open_samplers",
    "sessions": "open_sessions",
    "body_bytes": "request_bytes",
    "data": "request_datums",
    "tokens": "request_tokens",
    "samples": "request_completions",
}
"""Options that are not called as their limit."""
_PATIENCE = 40.0
"""Seconds that an answer may take: clients give up after 45."""
_MOST = {"answer_seconds": _PATIENCE, "poll_seconds": _PATIENCE}


def _limit_options(
    limits: type[Limits] | type[RequestLimits], texts: Mapping[str, str]
) -> Callable[[Any], Any]:
    """Return a decorator that adds an option for each limit that users set."""
    defaults = {field.name: field.default for field in fields(limits)}

    def add(command: Any) -> Any:
        for name, text in reversed([*texts.items()]):
            default = defaults[name]
            whole = isinstance(default, int)
            kind = (
                click.IntRange(min=1)
                if whole
                else click.FloatRange(min=0, min_open=True, max=_MOST.get(name))
            )
            option = f"--{_OPTIONS.get(name, name).replace('_', '-')}"
            command = click.option(option, name, type=kind, default=default, show_default=True, help=text)(
                command
            )
        return command

    return add


@code_option
@click.command()
@click.option("--config-path", "--config_path", metavar="PATH", help="As of regress train.")
@click.option(
    "--config-name", "--config_name", metavar="NAME", help="As of regress train; clients see this name."
)
@click.option(
    "--model",
    "named",
    multiple=True,
    metavar="NAME=PATH",
    help="Offer a model under a name: a YAML configuration, a directory of weights, or a name on the Hugging Face hub. "
    "Give it once for each.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: a free one."
)
@click.option("--wire", "wires", metavar="NAMES", help="Protocols: weaver, tinker, or both (the default).")
@click.option("--api-key", metavar="KEY", help="Key of all clients. Others on this machine can see it.")
@click.option("--api-key-file", metavar="FILE", help="File with a line OWNER KEY for each client.")
@click.option(
    "--state-dir",
    default="outputs/service",
    show_default=True,
    metavar="DIR",
    help="Requests and saves; a service that is started here again goes on from them.",
)
@click.option(
    "--log-format",
    "log",
    type=Choice(FORMATS),
    default="text",
    show_default=True,
    help="One line for each operation, on stderr.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds in which SIGTERM lets what is queued be executed.",
)
@_limit_options(Limits, _LIMITS)
@_limit_options(RequestLimits, _REQUEST_LIMITS)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def serve(ctx: click.Context, /, **options: Any) -> None:
    """Serve the engine as a remote training API, for the SDKs of Weaver and Tinker.

    Clients create models, send datums, make optimizer steps, save, load and sample; each step is exactly that of
    regress train. Operations of a model run in the order of their seq_id, each once.

    \b
    Serve a built-in configuration on loopback, with a key from the environment:
      GRPO_REGRESS_API_KEY=tml-secret regress serve --config-name reverse_string
    Then, in the environment of a client:
      WEAVER_BASE_URL=http://127.0.0.1:8000 WEAVER_API_KEY=tml-secret python train.py
      TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-secret python train.py
    Two models, on two ranks that the service starts itself:
      regress serve --model small=small.yaml --model big=checkpoints/big parallel.dp=2
    On the ranks of a launcher:
      torchrun --nproc-per-node 4 -m regress serve --config-path run.yaml parallel.fsdp=4
    On a free port, which a line of JSON on stdout names:
      regress serve --config-name demo --port 0

    \b
    Clients send the key as X-Weaver-API-Key or X-API-Key; the Tinker SDK wants one that
    begins with tml-. /healthz and /metrics (Prometheus) tell how the service does.
    SIGTERM executes what is queued and exits with 0. After a kill, the same command goes
    on from the last save of each model, and fails by name what was lost.

    \b
    Limits are options below. A request beyond one that is its own is refused by name; one that
    finds queues or memory full waits, and is then told to come again: no seq_id is spent.
    Longer contexts than a request may hold:
      regress serve --config-name big --request-tokens 16000000 --request-bytes 268435456
    """
    from regress.engine.determinism_environment import export_environment
    from regress.service.api_keys import api_keys

    keys = api_keys(options["api_key"], options["api_key_file"])
    configs = _configs(options["config_path"], options["config_name"], options["named"], options["overrides"])
    export_environment(next(iter(configs.values())).system_envs)
    sys.path.append(str(Path.cwd()))  # functions of one's own that a configuration names
    from regress.service.serve_run import Serving, serve

    wires = options["wires"]
    code = serve(
        Serving(
            configs=configs,
            api_keys=keys,
            state=Path(options["state_dir"]).absolute(),
            host=options["host"],
            port=options["port"],
            wires=None if wires is None else [name.strip() for name in wires.split(",")],
            limits=Limits(**{name: options[name] for name in _LIMITS}),
            requests=RequestLimits(**{name: options[name] for name in _REQUEST_LIMITS}),
            drain_timeout=options["drain_timeout"],
            log=options["log"],
        )
    )
    ctx.exit(code)


def _configs(
    config_path: str | None, config_name: str | None, named: Sequence[str], overrides: Sequence[str]
) -> dict[str, Config]:
    """Return the configurations of the models that are offered, by name."""
    from regress.engine.config import load_config
    from regress.engine.model_hub import is_on_hub

    if not named:
        name = config_name or (Path(config_path).stem if config_path else "default")
        return {Path(name).stem: load_config(config_path, config_name, overrides).config}
    found: dict[str, Config] = {}
    for text in named:
        name, equals, place = text.partition("=")
        path = Path(place)
        if not equals or not name or name in found or not (path.exists() or is_on_hub(place)):
            raise ConfigError(f"""--model {text} is not a name of its own with a path that exists; write --model
            NAME=PATH, with a YAML configuration, a directory of weights, or a name on the hub such as
            Qwen/Qwen2.5-3B-Instruct""")
        if path.is_dir() or not path.exists():
            weights = f"model.path='{path.absolute() if path.exists() else place}'"
            found[name] = load_config(config_path, config_name, [*overrides, weights]).config
        else:
            found[name] = load_config(place, None, overrides).config
    return found
