#!/bin/bash
# A sweep on a SLURM cluster: sbatch examples/clusters/slurm.sh sweep.toml
#
# Ray starts on every node of the allocation, the sweep runs on the first, and Ray stops with it. The working directory
# and the Python environment must be on a file system that all nodes mount. No GPUs are needed.
#SBATCH --job-name=fakedist-sweep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=02:00:00
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_ADDRESS="$head:6379"

# --kill-on-bad-exit: a node that fails to start Ray ends the job and does not leave the others waiting.
# Scripts may take SLURM's variables for their own rank, so Ray's nodes start without them.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  bash -c 'unset "${!SLURM_@}"; exec "$@"' bash \
  ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus "$SLURM_CPUS_ON_NODE" -- \
  fakedist sweep --on ray "$@"
