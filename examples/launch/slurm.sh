#!/usr/bin/env bash
#SBATCH --job-name=hbp
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=hbp-%j.log
#
# A recipe's run under Slurm, from the repository's root:
#
#     sbatch --nodes 32 --time 24:00:00 examples/launch/slurm.sh \
#         examples/recipes/deepseek-v2-32k.toml --hbp-corpus /data/corpus ...
#
# Send it with the environment active in which `hbp` and `torchrun` are: the nodes get its PATH. A job
# that ends at its --time is not put back: the same command goes on from the last checkpoint.
#
# One task a node starts torchrun.sh there. When a process fails torchrun restarts them all; when
# that does not help (a broken node) the job puts itself back into the queue, at most MAX_REQUEUES
# times, and goes on from its last checkpoint. --requeue does the same when a node is lost.
set -euo pipefail

if [[ $# -lt 1 || $1 == --* ]]; then
    echo "usage: sbatch --nodes N ${0##*/} RECIPE [Megatron flags]" >&2
    exit 2
fi

MAX_REQUEUES=${MAX_REQUEUES:-5}
export GPUS_PER_NODE=${GPUS_PER_NODE:-8}
export NODES=$SLURM_NNODES
export RUN_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
# Slurm runs a copy of this file from its own folder, so the launcher is found from where it was sent.
LAUNCHER=${LAUNCHER:-$SLURM_SUBMIT_DIR/examples/launch/torchrun.sh}

HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=$(head -n 1 <<<"$HOSTS")
export HEAD
# Two jobs on the same head node must not share a port.
export PORT=${PORT:-$((20000 + SLURM_JOB_ID % 20000))}

# SLURM_NODEID differs from node to node, so it is read there and not here. The check runs once. One
# task stands for all GPUs of its node: bound to a core, as some clusters do, it would starve them.
status=0
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$@"' \
    launch "$LAUNCHER" "$@" || status=$?

# 2 is wrong use and 1 may be a check that does not fit: neither gets better in the queue. They come
# within the first minute; what fails later is worth another start.
if [[ $status != 0 && $SECONDS -gt ${REQUEUE_AFTER_SECONDS:-300} &&
    ${SLURM_RESTART_COUNT:-0} -lt $MAX_REQUEUES ]]; then
    echo "hbp: exit code $status after $SECONDS s; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
