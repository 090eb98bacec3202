#!/usr/bin/env bash
# Runs a job on all of its nodes; called by the batch scripts in this folder, or in an allocation of salloc:
#   bash scripts/slurm/job.sh app/classify.py ARGS
#
# srun is the launcher: it starts one process per task and forwards Slurm's signals. A job that was stopped with a checkpoint
# (exit code 75) is requeued and resumes from its newest checkpoint; so is one that has lost a process (69, or a signal's code),
# at most three times without a new checkpoint. %a in an argument is the number of the array's task.
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
while timeout 5 bash -c ": <>/dev/tcp/$MASTER_ADDR/$MASTER_PORT" 2>/dev/null; do # another program listens there
  MASTER_PORT=$((10000 + RANDOM % 20000))
done
SAMERUN_MACHINES=$(IFS=, && echo "${machines[*]}")
export SAMERUN_MACHINES
export SAMERUN_LOSSES=$PWD/slurm-$SLURM_JOB_ID.losses # a line per loss; a new checkpoint removes the file

job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # one task's number is the whole array's, too
  set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"
fi
case " $* " in
*" --resume_from_checkpoint"* | *" --overwrite_output_dir"*) ;;
*) set -- "$@" --resume_from_checkpoint auto ;;
esac
options=(--kill-on-bad-exit=0 --wait=120) # rank 0 may still be saving when the first process ends
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || options+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
[ -z "${SLURM_GPUS_ON_NODE:-}" ] || options+=(--gpu-bind=none) # a process chooses its GPU by its local rank

code=0 said=$(mktemp)
trap 'rm -f "$said"' EXIT
# tee must outlive the signals to the job.
srun "${options[@]}" bash scripts/slurm/task.sh "$@" 2> >(trap '' TERM INT HUP USR1 && tee "$said" >&2) || code=$?
wait "$!" || true # for tee
# The exit code is the tasks' highest. Bad input or a failed training of one is what the others' losses come from.
for cause in 2 3; do
  if grep -q "^srun: error: .*: Exited with exit code $cause\$" "$said"; then code=$cause; fi
done

if [ "$code" -eq 69 ] || [ "$code" -gt 128 ]; then
  echo "exit code $code" >>"$SAMERUN_LOSSES"
  losses=$(wc -l <"$SAMERUN_LOSSES")
  reason="a process was lost ($losses of at most 3 times without a new checkpoint)"
  if [ "$losses" -gt 3 ]; then
    echo "error: a process was lost $losses times without a new checkpoint; not requeued again" >&2
    rm "$SAMERUN_LOSSES"
    exit "$code"
  fi
else
  rm -f "$SAMERUN_LOSSES"
  [ "$code" -eq 75 ] || exit "$code"
  reason='stopped with a checkpoint'
fi
if [ "${ENVIRONMENT:-}" != BATCH ]; then
  echo "$reason; the same command resumes" >&2
elif [ "${SLURM_RESTART_COUNT:-0}" -ge "${REQUEUE_LIMIT:-100}" ]; then
  echo "$reason; not requeued again after $SLURM_RESTART_COUNT times (REQUEUE_LIMIT)" >&2
  rm -f "$SAMERUN_LOSSES"
else
  echo "$reason; requeued" >&2
  trap '' TERM # which Slurm sends now
  if ! scontrol requeue "$job"; then
    echo "error: scontrol requeue failed; submit the same command again with sbatch" >&2
  elif [ -n "${SLURM_NTASKS_PER_NODE:-}" ]; then
    # Or a job with --nodes=1-4 would wait for the number of nodes that it has had.
    scontrol update "jobid=$job" "NumTasks=$SLURM_NTASKS_PER_NODE" || true
  fi
fi
exit "$code"
