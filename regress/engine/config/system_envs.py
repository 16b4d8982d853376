"""Environment variables that a configuration may set: those that change what is computed, not which code runs.

A configuration may come with a recording or a case of somebody else. What loads a library or a module, starts
a program or sends credentials elsewhere is left to the shell of the user, as are the variables of this package, one of
which allows all code.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase

from regress.engine.config.leaves import KeyPath
from regress.engine.config.origins import Origin
from regress.engine.config.schema import Config

REFUSED = (
    *("REGRESS_*", "GRPO_REGRESS_*"),
    *(
        "LD_*",
        "DYLD_*",
        "PYTHON*",
        "PATH",
        "HOME",
        "XDG_*",
        "GCONV_PATH",
        "OPENSSL_*",
        "COVERAGE_*",
        "PYTEST_*",
    ),
    *(
        "BASH_ENV",
        "BASH_FUNC_*",
        "ENV",
        "SHELL",
        "GIT_*",
        "PIP_*",
        "RAY_*",
        "WANDB__*",
        "CLASSPATH",
        "*JAVA*_OPTIONS",
    ),
    *("CC", "CXX", "CUDAHOSTCXX", "NVCC*", "CUDA_HOME", "CUDA_PATH", "*INCLUDE_PATH", "CPATH"),
    *("*LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"),
    *(
        "*PRELOAD*",
        "*PLUGIN*",
        "*INJECTION*",
        "NCCL_CONF_FILE",
        "OMP_TOOL*",
        "MPL*",
        "MATPLOTLIB*",
        "NUMBA_*",
    ),
    *(
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        "TORCH_EXTENSIONS_DIR",
        "TORCH_HOME",
        "TORCHINDUCTOR_*",
        "TRITON_*",
    ),
    *("*TRUST_REMOTE_CODE*", "HF_HOME", "HF_MODULES_CACHE"),
    *("HF_ENDPOINT", "WANDB_BASE_URL", "AWS_ENDPOINT_URL*", "FSSPEC_*", "*_PROXY", "MLFLOW_TRACKING_URI"),
)
"""Patterns of names, in capitals."""


def refused_variable(c: Config, origin: Callable[[KeyPath], Origin]) -> str | None:
    """Return why a variable may not be set, or cannot be one."""
    for name in c.system_envs:
        if not name or "=" in name or "\0" in name:
            return (
                f"system_envs.{name!r} cannot be the name of an environment variable, which is not empty and holds "
                "no = and no NUL; correct the name."
            )
        if any(fnmatchcase(name.upper(), pattern) for pattern in REFUSED):
            return (
                f"system_envs.{name} ({origin(('system_envs', name))}) decides which code runs or where credentials "
                "go, which no configuration may; set it in the shell that starts the command."
            )
    return None
