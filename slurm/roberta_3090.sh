#!/bin/bash
# Bidirectional language modelling on 10 servers of 8 x RTX 3090 (80 GPUs).
# From the repository's root: [TAU=24 METHOD=slowmo ...] sbatch slurm/roberta_3090.sh [--optim.lr 2e-3 ...]
# A trial needs a folder of its own, for a run keeps its length: OUT=runs/trial sbatch slurm/roberta_3090.sh --epochs 1
# Account and partition, if needed: SBATCH_ACCOUNT and SBATCH_PARTITION in your shell; see slurm/README.md.
#SBATCH --job-name=roberta_3090
#SBATCH --nodes=10
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

source slurm/env.sh && source slurm/launch.sh && array_job || exit 2

RECIPE="${RECIPE:-roberta_base_wikibooks}" # or roberta_large_wikibooks, roberta_base_wikitext103, ...
METHOD="${METHOD:-co2}"                    # or ddp, local, overlap_local, slowmo
TAU="${TAU:-48}"                           # local steps per round, of every method but ddp
ACCUMULATE="${ACCUMULATE-}" # micro-batches per step and GPU; more need less memory; empty: the recipe's
SEED="${SEED:-${SLURM_ARRAY_TASK_ID:-0}}"
GPU_GB="${GPU_GB:-24}" # GB of a GPU
case "$RECIPE" in
    roberta_*_wikibooks) fit=8160 ;; # 102 a GPU: the recipe's 8192 does not divide by 80
    roberta_*_wikitext103) fit=240 ;; # 3 a GPU: the recipe's 256 does not divide by 80
esac
BATCH_SIZE="${BATCH_SIZE-${fit-}}" # over all GPUs; empty: the recipe's
OUT="${OUT:-runs/3090/$RECIPE-$METHOD-tau$TAU-${SLURM_JOB_NUM_NODES-}nodes-seed$SEED}"
export CO2_DATA="${CO2_DATA:-$PWD/data}" # holds wikibooks/train.bin, wikibooks/val.bin; or in wikitext103/

launch language.train ${ACCUMULATE:+--accumulate "$ACCUMULATE"} "$@"
