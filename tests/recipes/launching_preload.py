"""What the server of `launching` imports before it forks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import torch  # noqa: E402

torch.set_num_threads(1)

import train  # noqa: E402, F401
