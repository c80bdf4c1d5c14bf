#!/bin/sh
# Build Transformer Engine from PyPI into an environment that has torch: its core is a wheel, its PyTorch side is compiled here.
#   tests/clients/build_transformer_engine.sh .venv/bin/python [VERSION]
# Needs gcc and nvcc of CUDA 13 (on PATH, in $CUDA_HOME or /usr/local/cuda; else nvidia-cuda-nvcc is installed from PyPI).
# MAX_JOBS says how many compilers run at once (default 1: each takes up to 3 GB). No GPU is needed.
set -eu
python=${1:?usage: $0 PYTHON [VERSION]}
version=${2:-2.20.2}
cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")')
case $cuda in
13.*) ;;
*) echo "$0: torch of $python is built for CUDA '$cuda'; Transformer Engine $version is built here for CUDA 13" >&2; exit 2 ;;
esac

install() { "$python" -m pip install --quiet --upgrade-strategy only-if-needed "$@"; }
install ninja wheel "setuptools>=77" einops onnx onnxscript pydantic nvdlfw-inspect "nvidia-cudnn-frontend>=1.29" "nvidia-curand>=10.4"
install --no-deps "transformer-engine==$version" "transformer-engine-cu13==$version"

# nvcc on PATH may be a wrapper: what counts is the toolkit it says it belongs to.
toolkit=$(nvcc --dryrun -c /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' || true)
for home in "${CUDA_HOME:-}" "$toolkit" /usr/local/cuda; do
    if [ -n "$home" ] && [ -x "$home/bin/nvcc" ]; then break; fi
    home=
done
if [ -z "$home" ]; then
    install "nvidia-cuda-nvcc==$cuda.*"
    home=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib') + '/nvidia/cu13')")
fi
CUDA_HOME=$home
# The headers of cuBLAS, cuDNN, NCCL and the cuDNN front end are next to the wheels' libraries.
CPATH=$("$python" - <<'PYTHON'
import pathlib, sys, sysconfig
import nvidia

found = [pathlib.Path(sysconfig.get_path("platlib"), "include")]  # nvidia-cudnn-frontend
for root in map(pathlib.Path, nvidia.__path__):
    found += sorted(root.glob("*/include"))
print(":".join(map(str, found)))
PYTHON
)${CPATH:+:$CPATH}
export CUDA_HOME CPATH
PATH=$(dirname "$python"):$CUDA_HOME/bin:$PATH
export NVTE_FRAMEWORK=pytorch MAX_JOBS="${MAX_JOBS:-1}" NVTE_BUILD_THREADS_PER_JOB=1
"$python" -m pip install --no-deps --no-build-isolation "transformer-engine-torch==$version"
"$python" -c 'import torch, transformer_engine.pytorch as te; print("transformer_engine.pytorch is installed:", te.__file__)'
