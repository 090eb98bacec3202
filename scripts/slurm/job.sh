#!/usr/bin/env bash
# What the batch scripts beside it do, on however many nodes Slurm gave them:  bash scripts/slurm/job.sh app/classify.py ARGS
#
# srun is the launcher: it starts one process per task, passes Slurm's signals on to each, and ends with the highest of their
# exit codes, so that 75 (stopped by request, a checkpoint is written) is told from a failure. Then the job is put back into
# the queue, and goes on from its newest checkpoint when it starts again.
set -euo pipefail
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ "${#machines[@]}" -gt 0 ] || {
  echo "error: scontrol names no machine for SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST" >&2
  exit 2
}
if [ $((SLURM_NTASKS % SLURM_NNODES)) -ne 0 ]; then
  echo "error: $SLURM_NTASKS tasks on $SLURM_NNODES nodes; ask for the same number on each (--ntasks-per-node)" >&2
  exit 2
fi
export MASTER_ADDR=${machines[0]}
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # another one for each job of a node, below the ports of clients
FINETUNE_MACHINES=$(
  IFS=,
  echo "${machines[*]}"
)
export FINETUNE_MACHINES

case " $* " in
*" --resume_from_checkpoint"* | *" --overwrite_output_dir"*) ;;
*) set -- "$@" --resume_from_checkpoint auto ;;
esac
options=(--kill-on-bad-exit=0 --wait=120) # rank 0 may still be writing when the first of them has ended
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || options+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
[ -z "${SLURM_GPUS_ON_NODE:-}" ] || options+=(--gpu-bind=none) # a process chooses its GPU by its number on the node

code=0
srun "${options[@]}" bash scripts/slurm/task.sh "$@" || code=$?
if [ "$code" -eq 75 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${REQUEUE_LIMIT:-100}" ]; then
    echo "stopped ${SLURM_RESTART_COUNT} times; not put back into the queue again (REQUEUE_LIMIT)" >&2
  else
    echo "stopped with a checkpoint; back into the queue" >&2
    scontrol requeue "$SLURM_JOB_ID" || echo "error: could not be put back into the queue; sbatch the same command again" >&2
  fi
fi
exit "$code"
