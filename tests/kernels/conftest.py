"""The tests in ``device/`` launch Triton kernels: on a GPU, or under TRITON_INTERPRET=1, which has to be set before
anything imports triton. Without either they are collected only in the subprocess that test_interpreted.py starts."""

import os

import torch

collect_ignore = [] if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else ["device"]
