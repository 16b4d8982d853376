"""torch inductor: its cache hands code for one vector width to another, and the result is wrong.

The key of a cached graph does not name the instruction set. Loops written for 16 floats (AVX-512) and built where a
vector holds 8 (AVX2) leave out every other 8. Machines that share a cache do this to each other; on one machine
ATEN_CPU_CAPABILITY shows it.
"""

import os
import subprocess
import sys
import tempfile

import torch

RUN = """
import torch
values = torch.linspace(0, 1, 1003)
total = lambda values: (values.sin() + values.exp()).sum()
print(float(total(values)), float(torch.compile(total)(values)))
"""


def run(capability: str, cache: str) -> tuple[float, float]:
    """The sum without and with compilation."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-W", "ignore", "-c", RUN]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=240).stdout
    right, compiled = output.split()
    return float(right), float(compiled)


if __name__ == "__main__":
    print(f"torch {torch.__version__} on a machine with {torch.backends.cpu.get_cpu_capability()}")
    ratios = []
    with tempfile.TemporaryDirectory() as cache:
        for capability in ("avx512", "avx2"):
            right, compiled = run(capability, cache)
            ratios.append(compiled / right)
            print(f"{capability:6}  right {right:.3f}  actual {compiled:.3f}  ratio {ratios[-1]:.4f}")
    reproduced = abs(ratios[0] - 1) < 1e-3 < abs(ratios[1] - 1)
    print("reproduced" if reproduced else "fixed in this version, or no AVX-512 here")
    raise SystemExit(not reproduced)
