#!/bin/bash
# Fine-tuning of a causal language model in Hugging Face's format on 16 x DGX-A100 (128 GPUs).
# From the repository's root: MODEL=/path/opt-1.3b DATA=/path/sst2 sbatch slurm/finetune_a100.sh [--optim.lr 2e-6 ...]
# --lora.rank 8 needs peft: docs/zeroth.md.
# Account and partition, if needed: SBATCH_ACCOUNT and SBATCH_PARTITION in your shell; see slurm/README.md.
#SBATCH --job-name=finetune_a100
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=128
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

source slurm/env.sh && source slurm/launch.sh && array_job || exit 2

RECIPE="${RECIPE:-prompts}" # or prompts_adamw, text, text_adamw
case "$RECIPE" in
    *_adamw) METHOD="${METHOD:-ddp}" ;; # or co2, local, overlap_local, slowmo
    *) METHOD="${METHOD:-zo}" ;;        # two forward passes a step, and scalars between workers
esac
TAU="${TAU:-48}"            # local steps per round, of every method but zo and ddp
ACCUMULATE="${ACCUMULATE-}" # micro-batches per step and GPU; more need less memory; empty: the recipe's
SEED="${SEED:-${SLURM_ARRAY_TASK_ID:-0}}"
GPU_GB="${GPU_GB:-40}" # GB of a GPU; 80 in the larger DGX-A100
fit=128 # over all GPUs: the recipe's 16 does not divide by 128
BATCH_SIZE="${BATCH_SIZE-$fit}" # empty: the recipe's
export CO2_DATA="${CO2_DATA:-$PWD/data}"
MODEL="${MODEL:-$CO2_DATA/model}"  # config.json, *.safetensors and the tokenizer's files
DATA="${DATA:-$CO2_DATA/prompts}"  # train.jsonl and val.jsonl, or train.txt and val.txt
OUT="${OUT:-runs/a100/${MODEL##*/}-$RECIPE-$METHOD-tau$TAU-${SLURM_JOB_NUM_NODES-}nodes-seed$SEED}"

launch language.finetune --model "$MODEL" --data "$DATA" ${ACCUMULATE:+--accumulate "$ACCUMULATE"} "$@"
