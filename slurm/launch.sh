# Shared by the task scripts, which source it: one torchrun a node, and saving and requeueing before the time limit.

# array_job: in a job array of reproduce.py --array, sets what this job's line of the file JOBS says.
array_job() {
    [ -n "${JOBS-}" ] || return 0
    local line
    : "${SLURM_ARRAY_TASK_ID:?JOBS is set, but this is no job array}"
    line="$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$JOBS")" && [ -n "$line" ] || {
        echo "error: $JOBS has no line for job $SLURM_ARRAY_TASK_ID of the array" >&2
        return 1
    }
    eval "$line"
}

# loader_workers: how many processes can load data for each GPU: a GPU's share of the cores but one.
loader_workers() {
    local share=$((${SLURM_CPUS_PER_TASK:-1} / ${SLURM_GPUS_ON_NODE:-1}))
    echo $((share > 2 ? share - 1 : 1))
}

# What srun starts on each node, wherever it begins: on_node TORCHRUN... in the repository, its first argument.
PAYLOAD='cd "$1" 2>/dev/null && . slurm/launch.sh || {
    echo "error: the repository, $1, is not there on $HOSTNAME: a shared folder, and in a container a mount, must have it" >&2
    exit 2
}
on_node "${@:2}"'

# enter_container: sets `entry`, the words that put what srun starts into CONTAINER.
enter_container() {
    [ -n "${CONTAINER-}" ] || return 0
    local image="$CONTAINER" seen
    case "$image" in
        *.sif | *.sqsh) # by its full path: Pyxis takes a bare name for a registry's image
            image="$(realpath -eq "$image")" || {
                echo "error: CONTAINER=$CONTAINER: no such file; slurm/README.md says how to build one" >&2
                return 2
            } ;;
    esac
    export CO2_CACHE="${CO2_CACHE:-$HOME/.cache/co2}"
    mkdir -p "$OUT" "$CO2_CACHE" && seen="$(folders)" || return
    case "$image" in
        *.sif) entry=(apptainer exec --nv --bind "$seen" --pwd "$PWD" "$image") ;;
        *) entry=(--container-image="$image" --container-mounts="$seen" --container-workdir="$PWD") ;;
    esac
}

# folders: SRC:DST,... of all that the workers read and write, and of where links lead: in a container as outside of it.
folders() {
    local path
    for path in "$PWD" "$CO2_DATA" "$OUT" "$CO2_CACHE" "${MODEL-}" "${DATA-}"; do
        if [ -e "$path" ]; then realpath -s "$path" && realpath "$path"; fi
    done | sort -u | sed 's/.*/&:&/' | { cat; [ -z "${CONTAINER_MOUNTS-}" ] || echo "$CONTAINER_MOUNTS"; } | paste -sd,
}

# carry: sets `carried`, NAME=VALUE of what the workers need of this environment: a container has its own, whose values
# hold against exported ones.
carry() {
    local name
    for name in CO2_DATA CO2_CACHE LOGS OMP_NUM_THREADS ${!NCCL_@} ${!GLOO_@} ${!TORCH_@} ${!TORCHELASTIC_@}; do
        [ -z "${!name+set}" ] || carried+=("$name=${!name}")
    done
}

# launch MODULE [overrides]: trains with RECIPE, METHOD, TAU, BATCH_SIZE, SEED and OUT on all nodes of the job; exits. fit:
# the batch that a script gives in place of the recipe's, which is told.
launch() {
    local module="$1" status=0 late="" options=(
        --method "$METHOD" --co2.tau "$TAU" ${BATCH_SIZE:+--batch_size "$BATCH_SIZE"} --seed "$SEED" --gpu_gb "$GPU_GB"
        ${LOADER_WORKERS:+--loader_workers "$LOADER_WORKERS"}
        --device cuda --out "$OUT" --resume # a fresh folder starts at step 0
    )
    shift
    : "${SLURM_JOB_NUM_NODES:?submit this script with sbatch}" "${SLURM_GPUS_ON_NODE:?the job has no GPUs}"
    local head="${RDZV_HOST:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
    local torchrun=(
        torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --rdzv-backend=c10d
        --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:${RDZV_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
        --tee=3 $TORCHRUN_ARGS # to the job's log, and to a log of each worker's own
    )
    export LOGS="$OUT/logs" TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))}"
    set -- "${torchrun[@]}" -m "$module" "$RECIPE" "${options[@]}" "${JOB_ARGS[@]}" "$@"
    [ -z "${fit-}" ] || [ "$BATCH_SIZE" != "$fit" ] ||
        echo "batch $fit over all GPUs, not the recipe's, which does not divide by this cluster's GPUs"
    local entry=() carried=()
    enter_container && carry || exit 2
    echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST, data in $CO2_DATA: $*"

    # Since 22.05, srun no longer takes the job's --cpus-per-task by itself: each torchrun would get one core.
    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores \
        --kill-on-bad-exit=1 $SRUN_ARGS "${entry[@]}" env "${carried[@]}" bash -c "$PAYLOAD" on_node "$PWD" "$@" &
    local step=$! early
    stop_in_time >/dev/null 2>&1 &
    early=$!
    # once: a second signal would end the workers without a checkpoint
    trap '[ -n "$late" ] || { kill -USR1 "$step"; requeue_at_last & late=$!; }' USR1
    trap : TERM # Slurm has sent it to the workers too: leave them the time to save
    wait_for "$step" || status=$?
    { kill "$early" $late; wait "$early" $late; } 2>/dev/null
    # A run that has ended needs no other start, one that has failed would fail again, and a cancelled one is not wanted.
    if grep -qs stopped_by_signal "$OUT/summary.json" && { [ -n "$late" ] || preempted; } && ! cancelled; then
        echo "job $SLURM_JOB_ID was told to stop, and its run has saved: back into the queue"
        requeue || status=1
    fi
    exit "$status"
}

# preempted: whether jobs of a higher priority take the job's place. Slurm requeues it by itself only if it is still there
# at the end of the partition's GraceTime.
preempted() {
    scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'
}

# cancelled: whether the job was, also while it was being stopped for another reason: a requeue would bring it back. Slurm
# then calls the job completing, though this script still runs.
cancelled() {
    ! preempted && scontrol show job "$SLURM_JOB_ID" | grep -q 'JobState=\(CANCELLED\|COMPLETING\)'
}

# requeue: puts the job back into the queue, which ends it.
requeue() {
    scontrol requeue "$SLURM_JOB_ID" && return
    echo "error: not requeued; submit it again, and it goes on from its last checkpoint" >&2
    return 1
}

# requeue_at_last: where the run has not ended a minute before the job's time limit, requeues the job regardless, for at
# the limit it would not be; it then goes on from its last complete checkpoint.
requeue_at_last() {
    local now end
    now="$(date +%s)"
    end="$(limit)" || end=$((now + 600)) # --signal's
    nap $((end - now > 60 ? end - now - 60 : 1))
    cancelled && return
    echo "job $SLURM_JOB_ID is still running a minute before its limit: back into the queue"
    requeue
}

# stop_in_time: sends this script the signal by itself where --signal's time would not do. A run needs two rounds to agree
# to stop, and another until its checkpoint is written: three times as long as a checkpoint took, which its manifest.json
# says, from the end of a round to the last byte. A tenth of the job's time is left for training in any case.
stop_in_time() {
    local start end took lead left
    start="$(date +%s)"
    while end="$(limit)"; do
        took="$(sed -n 's/^ "seconds": \([0-9]*\).*/\1/p' "$OUT"/checkpoints/step*/manifest.json | sort -n | tail -n 1)"
        lead=$((3 * ${took:-0} + 60))
        left=$((end - $(date +%s) - (lead < (end - start) * 9 / 10 ? lead : (end - start) * 9 / 10)))
        if [ -n "$took" ] && [ "$left" -le 0 ]; then
            kill -USR1 "$$"
            return
        fi
        nap $((left > 300 ? 300 : left > 5 ? left : 5))
    done
}

# limit: when the job's time is over, in seconds since 1970; fails where it has no end.
limit() {
    local end
    end="$(squeue -h -j "$SLURM_JOB_ID" -o %e)" && [ -n "$end" ] && date -d "$end" +%s
}

# nap SECONDS: sleeps in this process, so that nothing of it is left when that is killed.
nap() {
    local idle
    exec {idle}<> <(:)
    read -r -t "$1" -u "$idle"
    exec {idle}>&-
}

# on_node TORCHRUN...: runs it, with a log of each worker in LOGS, and passes signals on to the workers, since Slurm may
# signal all processes or only the one that it started. torchrun ignores them (which is inherited), for it would end
# the workers by SIGTERM, and itself by a second one. The workers handle them: they finish the round, save, and end
# with status 0.
on_node() {
    command -v pkill >/dev/null || {
        echo "error: no pkill on $HOSTNAME or in its container, so no run could be stopped in time: install procps" >&2
        return 2
    }
    trap '' USR1 TERM
    export PET_SIGNALS_TO_HANDLE=SIGINT # torchrun's --signals-to-handle, of torch 2.9 and newer
    "$1" ${LOGS:+--log-dir="$LOGS/${SLURMD_NODENAME:-$HOSTNAME}"} "${@:2}" &
    local torchrun=$!
    trap 'pkill -USR1 -P "$torchrun"' USR1 TERM
    wait_for "$torchrun"
}

# wait_for PID: waits until it has ended, whatever trapped signals interrupt; returns its status.
wait_for() {
    while kill -0 "$1" 2>/dev/null; do wait "$1"; done
    wait "$1"
}
