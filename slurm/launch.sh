# Shared by the task scripts, which source it: one torchrun a node, and saving and requeueing before the time limit.

# launch MODULE [overrides]: trains with RECIPE, METHOD, TAU, BATCH_SIZE, SEED and OUT on all nodes of the job, and exits.
launch() {
    local module="$1" status=0 signalled="" options=(
        --method "$METHOD" --co2.tau "$TAU" ${BATCH_SIZE:+--batch_size "$BATCH_SIZE"} --seed "$SEED"
        --out "$OUT" --resume # a fresh folder starts at step 0
    )
    shift
    : "${SLURM_JOB_NUM_NODES:?submit this script with sbatch}" "${SLURM_GPUS_ON_NODE:?the job has no GPUs}"
    local head="${RDZV_HOST:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
    local torchrun=(
        torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --rdzv-backend=c10d
        --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:${RDZV_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
    )
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))}"
    set -- "${torchrun[@]}" -m "$module" "$RECIPE" "${options[@]}" "$@"
    echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST, data in $CO2_DATA: $*"

    # Since 22.05, srun no longer takes the job's --cpus-per-task by itself: each torchrun would get one core.
    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
        --kill-on-bad-exit=1 bash -c 'source slurm/launch.sh; on_node "$@"' on_node "$@" &
    local step=$!
    trap 'signalled=yes; kill -USR1 "$step"' USR1
    wait_for "$step" || status=$?
    if [ -n "$signalled" ]; then
        echo "job $SLURM_JOB_ID got SIGUSR1, and its run ended with status $status: back into the queue"
        scontrol requeue "$SLURM_JOB_ID" || {
            echo "error: not requeued; submit it again, and it goes on from its last checkpoint" >&2
            status=1
        }
    fi
    exit "$status"
}

# on_node COMMAND...: runs torchrun and passes signals on, since Slurm may signal the process that it started and no
# other. SIGUSR1 would end torchrun, which therefore ignores it (this is inherited); the workers handle it: they finish
# the round, save, and end with status 0.
on_node() {
    trap '' USR1
    "$@" &
    local torchrun=$!
    trap 'pkill -USR1 -P "$torchrun"' USR1
    trap 'kill -TERM "$torchrun"' TERM
    wait_for "$torchrun"
}

# wait_for PID: waits until it has ended, whatever trapped signals interrupt; returns its status.
wait_for() {
    while kill -0 "$1" 2>/dev/null; do wait "$1"; done
    wait "$1"
}
