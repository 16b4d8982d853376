"""Training service that a remote trainer uses, under NexRL's names."""

from dataclasses import dataclass, field

from regress.engine.config.sections.value import value

BACKENDS = ("weaver", "tinker")
TRAINING_MODES = ("lora", "full_ft")
CLIENTS = ("auto", "own", "sdk")
_CLIENT = "who speaks to the service: own client, the official SDK, or auto: the SDK where it is installed"
_KEY = "its key; null: that of the environment variable "
_BASE = "name of the model to train; null: the only one that the service offers"
_TIMEOUT = "seconds for which one operation of the service is waited for"


@dataclass
class WeaverServiceConfig:
    """Service that speaks Weaver's protocol."""

    base_url: str | None = value(None, "its URL, such as http://127.0.0.1:8000; null: WEAVER_BASE_URL")
    api_key: str | None = value(None, _KEY + "WEAVER_API_KEY")
    base_model: str | None = value(None, _BASE)
    training_mode: str = value(
        "lora", "what is trained: low-rank adapters, or all parameters", choices=TRAINING_MODES
    )
    lora_rank: int = value(32, "training_mode=lora: rank of the adapters", minimum=1)
    client: str = value("auto", _CLIENT, choices=CLIENTS)
    timeout: float = value(600.0, _TIMEOUT, exclusive_minimum=0.0)


@dataclass
class TinkerServiceConfig:
    """Service that speaks Tinker's protocol."""

    base_url: str | None = value(None, "its URL, such as http://127.0.0.1:8000; null: TINKER_BASE_URL")
    api_key: str | None = value(None, _KEY + "TINKER_API_KEY")
    base_model: str | None = value(None, _BASE)
    lora_rank: int = value(32, "rank of the adapters; 0: all parameters are trained", minimum=0)
    client: str = value("auto", _CLIENT, choices=CLIENTS)
    timeout: float = value(600.0, _TIMEOUT, exclusive_minimum=0.0)


@dataclass
class TrainServiceConfig:
    """Choice of the service."""

    backend: str = value("weaver", "protocol of the service that trains and samples", choices=BACKENDS)


@dataclass
class ServiceConfig:
    """Training service of trainer.type=remote."""

    train_service: TrainServiceConfig = field(default_factory=TrainServiceConfig)
    weaver_service: WeaverServiceConfig = field(default_factory=WeaverServiceConfig)
    tinker_service: TinkerServiceConfig = field(default_factory=TinkerServiceConfig)
