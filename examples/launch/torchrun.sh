#!/usr/bin/env bash
# One node's part of a recipe's run. Start it on every node, at about the same time:
#
#     examples/launch/torchrun.sh RECIPE [Megatron flags]                              # one node
#     NODES=4 NODE_RANK=0 HEAD=node0 examples/launch/torchrun.sh RECIPE [flags]        # the first
#     NODES=4 NODE_RANK=1 HEAD=node0 examples/launch/torchrun.sh RECIPE [flags]        # and so on
#
# `hbp` and `torchrun` must be on PATH. Flags given here win over the recipe's, e.g.
# `--hbp-corpus /data/corpus --save /ckpt --load /ckpt`. A relative path is taken from the folder in
# which this is started.
set -euo pipefail

if [[ $# -lt 1 || $1 == --* ]]; then
    echo "usage: ${0##*/} RECIPE [Megatron flags], e.g. examples/recipes/llama-3.1-8b.toml" >&2
    exit 2
fi
RECIPE=$1
shift

NODES=${NODES:-1}
if [[ $NODES != 1 && (-z ${HEAD:-} || -z ${NODE_RANK:-}) ]]; then
    echo "${0##*/}: $NODES nodes need HEAD, the first one's name, and NODE_RANK, 0 on the first" >&2
    exit 2
fi
NODE_RANK=${NODE_RANK:-0}
HEAD=${HEAD:-localhost}
PORT=${PORT:-29500}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MAX_RESTARTS=${MAX_RESTARTS:-3}
CHECK=${CHECK:-1}
WAIT_SECONDS=${WAIT_SECONDS:-1800}
GPUS=$((NODES * GPUS_PER_NODE))

# TP overlaps its exchanges with products of matrices, which relies on kernels starting in the order
# in which they were sent: one queue. Megatron refuses TP without it before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Levels differ in what they keep and in how long their packs are, so blocks of many sizes come and
# go: segments that grow keep the memory from falling to pieces.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# NVLink SHARP takes GPU memory for every group of processes, and there is one for each CP size; it
# speeds up reductions inside a node, of which there are few.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
# By default torchrun keeps one store for all its starts, and a process that is started again may meet
# a peer's address from before (github.com/pytorch/pytorch/issues/135712; release 2.14 still does).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
# What PyTorch does by itself is left to it: processes that wait for one that hangs end after
# --distributed-timeout-minutes, each writes down what it was doing (--flight-recorder-dump-path says
# where), and torchrun restarts them. NCCL finds the network, too: NCCL_SOCKET_IFNAME and NCCL_IB_HCA
# only where it takes the wrong one.

# Not inside mapfile's own redirection, where a failure would go unseen.
WORDS=$(hbp flags "$RECIPE" --gpus "$GPUS" -- "$@")
mapfile -t FLAGS <<<"$WORDS"

# Seconds on one CPU, before a thousand GPUs find it out. The other nodes meanwhile try to reach this
# one: by torchrun's defaults for 60 s, which is less than a check of 2,048 GPUs may take.
if [[ $NODE_RANK == 0 && $CHECK == 1 ]]; then
    hbp check "$RECIPE" --gpus "$GPUS" --gpus-per-node "$GPUS_PER_NODE" -- "$@"
fi

# After a failure torchrun starts all processes of all nodes again, at most MAX_RESTARTS times. They
# go on from the last checkpoint in --load with the step of the plan that comes after it: no sample
# is trained twice for the weights, none is left out.
exec torchrun \
    --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" \
    --rdzv-conf "read_timeout=$WAIT_SECONDS,join_timeout=$WAIT_SECONDS" \
    --rdzv-id "${RUN_ID:-hbp}" --max-restarts "$MAX_RESTARTS" \
    -m megatron_hbp.host.pretrain_gpt "${FLAGS[@]}"
