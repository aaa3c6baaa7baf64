#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Puts the CUDA run-time compiler into .local/nvrtc (90 MB; needs no GPU): the kernel tests compile with it.
# usage: scripts/setup_nvrtc.sh [version]
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-13.0.88}
if ! ls .local/nvrtc/nvidia_cuda_nvrtc*-"$version".dist-info >/dev/null 2>&1; then
  rm -rf .local/nvrtc
  python3 -m pip install --quiet --no-deps --target .local/nvrtc "nvidia-cuda-nvrtc==$version"
fi
dirname "$(find "$PWD/.local/nvrtc" -name 'libnvrtc.so.*' | sort | head -1)"
