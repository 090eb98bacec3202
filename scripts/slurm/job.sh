#!/usr/bin/env bash
# Runs a job on all of its nodes; called by the batch scripts in this folder:  bash scripts/slurm/job.sh app/classify.py ARGS
#
# srun is the launcher: it starts one process per task, forwards Slurm's signals and exits with the highest exit code of the
# processes. After exit code 75 (stopped with a checkpoint) the job is requeued and resumes from its newest checkpoint.
set -euo pipefail
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ "${#machines[@]}" -gt 0 ] || {
  echo "error: scontrol shows no machine for SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST" >&2
  exit 2
}
if [ $((SLURM_NTASKS % SLURM_NNODES)) -ne 0 ]; then
  echo "error: $SLURM_NTASKS tasks on $SLURM_NNODES nodes; request the same number per node (--ntasks-per-node)" >&2
  exit 2
fi
export MASTER_ADDR=${machines[0]}
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # differs between the jobs of a node; below the ephemeral ports
SAMERUN_MACHINES=$(
  IFS=,
  echo "${machines[*]}"
)
export SAMERUN_MACHINES

case " $* " in
*" --resume_from_checkpoint"* | *" --overwrite_output_dir"*) ;;
*) set -- "$@" --resume_from_checkpoint auto ;;
esac
options=(--kill-on-bad-exit=0 --wait=120) # rank 0 may still be saving when the first process ends
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || options+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
[ -z "${SLURM_GPUS_ON_NODE:-}" ] || options+=(--gpu-bind=none) # a process chooses its GPU by its local rank

code=0
srun "${options[@]}" bash scripts/slurm/task.sh "$@" || code=$?
if [ "$code" -eq 75 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${REQUEUE_LIMIT:-100}" ]; then
    echo "stopped ${SLURM_RESTART_COUNT} times; not requeued again (REQUEUE_LIMIT)" >&2
  else
    echo "stopped with a checkpoint; requeued" >&2
    scontrol requeue "$SLURM_JOB_ID" || echo "error: scontrol requeue failed; submit the same command again with sbatch" >&2
  fi
fi
exit "$code"
