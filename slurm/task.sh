# source slurm/task.sh TASK CLUSTER [overrides]: what all scripts of this folder do. They differ only in their #SBATCH
# lines, which sbatch reads from the script that it gets, and in the tables below.

source slurm/env.sh && source slurm/launch.sh && array_job || exit 2

task="$1" cluster="$2"
shift 2

# -- tasks: the train script, and its recipes, of which RECIPE names one; the default is the first

case "$task" in
    vision) # CO2_DATA holds imagenet/{train,val}/CLASS/*.JPEG, or imagenet/{train,val}/*.tar
        module=vision.train
        recipes="imagenet_resnet50 imagenet_resnet50_nodes imagenet_vit_base imagenet_swin_tiny imagenet_regnet" ;;
    segmentation) # CO2_DATA holds ade/ADEChallengeData2016/{images,annotations}/
        module=segmentation.train
        recipes="ade20k_resnet50 ade20k_resnet101 ade20k_swin_tiny ade20k_swin_base ade20k_vit_base" ;;
    pointcloud) # CO2_DATA holds ShapeNetCore.v2.PC15k/SYNSET/SPLIT/*.npy
        module=pointcloud.train
        recipes="shapenet_folding shapenet_mlp shapenet_mae shapenet55_mae"
        tau=12 ;;
    gpt2) # CO2_DATA holds openwebtext/train.bin, openwebtext/val.bin; or in wikitext103/
        module=language.train
        recipes="gpt2_small_owt gpt2_medium_owt gpt2_large_owt gpt2_xl_owt transnormer_7b_owt gpt2_small_wikitext103 gpt2_medium_zo_owt" ;;
    roberta) # CO2_DATA holds wikibooks/train.bin, wikibooks/val.bin; or in wikitext103/
        module=language.train
        recipes="roberta_base_wikibooks roberta_large_wikibooks roberta_base_wikitext103 roberta_large_wikitext103" ;;
    finetune) # --lora.rank 8 needs peft: docs/language.md
        module=language.finetune
        recipes="prompts prompts_adamw text text_adamw" ;;
esac
export CO2_DATA="${CO2_DATA:-$PWD/data}"
RECIPE="${RECIPE:-${recipes%% *}}"
TAU="${TAU:-${tau:-48}}" # local steps per round, of every method but ddp and zo
SEED="${SEED:-${SLURM_ARRAY_TASK_ID:-0}}"
name="$RECIPE${PER_NODE:+-per$PER_NODE}"
case "$task:$RECIPE" in
    finetune:prompts | finetune:text) METHOD="${METHOD:-zo}" ;; # two forward passes a step, scalars between workers
    finetune:*) METHOD="${METHOD:-ddp}" ;;
    gpt2:*_zo_*) METHOD="${METHOD:-zo}" ;;
    *) METHOD="${METHOD:-co2}" ;; # or ddp, local, overlap_local, slowmo
esac
case "$task" in
    vision | segmentation | pointcloud)
        LOADER_WORKERS="${LOADER_WORKERS:-$(loader_workers)}" ;; # processes per GPU that load data
    finetune)
        MODEL="${MODEL:-$CO2_DATA/model}"  # config.json, *.safetensors and the tokenizer's files
        DATA="${DATA:-$CO2_DATA/prompts}"  # train.jsonl and val.jsonl, or train.txt and val.txt
        more=(--model "$MODEL" --data "$DATA")
        name="${MODEL##*/}-$RECIPE" ;;
esac

# -- clusters: the GB of a GPU, and the batch over all GPUs where they do not divide the recipe's, which `launch` tells

case "$cluster" in
    a100) GPU_GB="${GPU_GB:-40}" ;; # 80 in the larger DGX-A100
    3090) GPU_GB="${GPU_GB:-24}" ;;
esac
case "$cluster:$RECIPE" in
    a100:gpt2_medium_zo_owt) ;; # its own 512 divides by 64 pairs of GPUs
    a100:gpt2_*_owt) fit=512 ;;
    a100:prompts* | a100:text*) fit=128 ;;
    a100:transnormer_*) [ "$GPU_GB" -ge 80 ] || more=(--zero 3) ;; # the recipe needs 80 GB
    3090:imagenet_resnet50* | 3090:imagenet_regnet | 3090:roberta_*_wikibooks) fit=8160 ;;
    3090:imagenet_*) fit=4000 ;; # even for Mixup, 50 a GPU
    3090:ade20k_* | 3090:shapenet55_mae | 3090:*_wikitext103) fit=240 ;;
    3090:gpt2_medium_zo_owt) fit=480 ;; # 12 a pair of GPUs
    3090:gpt2_large_owt) ACCUMULATE="${ACCUMULATE:-4}" ;; # 2 samples at a time, to fit 24 GB
    3090:gpt2_xl_owt) PER_NODE="${PER_NODE-0}" more=(--zero 2) ;; # to fit 24 GB
    3090:transnormer_*) fit=480 more=(--zero 3 --offload) ;; # to fit 24 GB
    3090:prompts* | 3090:text*) fit=80 ;;
esac
BATCH_SIZE="${BATCH_SIZE-${fit-}}" # over all GPUs; empty: the recipe's
OUT="${OUT:-runs/$cluster/$name-$METHOD-tau$TAU-${SLURM_JOB_NUM_NODES-}nodes-seed$SEED}"

# ACCUMULATE: micro-batches per step and GPU; more need less memory; empty: the recipe's
# PER_NODE: GPUs that average gradients in every step, with METHOD between such nodes, such as 8; empty: the recipe's
launch "$module" ${ACCUMULATE:+--accumulate "$ACCUMULATE"} ${PER_NODE:+--per_node "$PER_NODE"} "${more[@]}" "$@"
