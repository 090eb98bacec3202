#!/usr/bin/env bash
# Starts one job on several machines over plain ssh:
#
#   bash scripts/multi_node.sh --hosts node1,node2 --processes_per_host 8 app/classify.py ARGS
#   bash scripts/multi_node.sh --hosts node1,node2 --processes_per_host 8 \
#     app/titlegen.py --deepspeed ds_configs/zero2.json --mixed_precision bf16 ARGS
#
# Every host needs, at the same path as here, this repository in the current folder (or --directory DIR) and the Python
# environment (or --python FILE), and an ssh login without a password. No shared disk is needed. The first host is machine 0. The
# others must reach it under that name (or --address NAME) at --port, and each other at any port.
#
# Forwards environment variables that begin with HF_, NCCL_, GLOO_, OMP_ or TORCH_, except tokens. Sends SIGTERM, SIGINT and
# SIGUSR1 to every process: the job writes a checkpoint and ends with exit code 75. The same happens if this script or its
# connection dies. The exit code is that of the first process that failed. A job that has lost a process or a machine starts again
# from its newest checkpoint after RESTART_SECONDS (20), at most three times without a new checkpoint.
set -euo pipefail

usage() {
  echo "usage: multi_node.sh --hosts A,B,... --processes_per_host N [--port 29500] [--address NAME] [--directory DIR]" \
    "[--python FILE] SCRIPT ARGS" >&2
  exit 2
}

hosts='' processes='' port=29500 address='' directory=$PWD python=$(command -v python || command -v python3)
while [ $# -gt 0 ]; do
  case $1 in
  --hosts | --processes_per_host | --port | --address | --directory | --python)
    [ $# -ge 2 ] || usage
    case $1 in
    --hosts) hosts=$2 ;;
    --processes_per_host) processes=$2 ;;
    --port) port=$2 ;;
    --address) address=$2 ;;
    --directory) directory=$2 ;;
    --python) python=$2 ;;
    esac
    shift 2
    ;;
  -*)
    echo "error: unknown option $1; put options of the script after its name" >&2
    usage
    ;;
  *) break ;;
  esac
done
{ [ -n "$hosts" ] && [[ $processes =~ ^[1-9][0-9]*$ ]] && [[ $port =~ ^[0-9]+$ ]] && [ $# -gt 0 ]; } || usage
IFS=, read -r -a machines <<<"$hosts"
count=${#machines[@]}
address=${address:-${machines[0]#*@}}
grace=${GRACE_SECONDS:-120} # for the other machines after one has failed
losses=/tmp/samerun-$HOSTNAME-$$.losses # on machine 0, a line per loss; a new checkpoint removes the file
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

forwarded=("SAMERUN_MACHINES=$hosts" "GRACE_SECONDS=$grace" "SAMERUN_LOSSES=$losses")
while IFS= read -r name; do
  case $name in
  *TOKEN*) ;;
  HF_* | NCCL_* | GLOO_* | OMP_* | TORCH_*) forwarded+=("$name=${!name}") ;;
  esac
done < <(compgen -e)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

connect() { ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=30 "$@"; }

# Every ssh reads signal names from a pipe of this shell. The pipe ends with the shell. All ssh processes start before the first
# pipe is opened, so that none of them inherits another's.
start() {
  local i pipe command
  for ((i = 0; i < count; i++)); do
    mkfifo "$folder/$i.in"
    command=(env "${forwarded[@]}" "$python" "$here/machine.py" --node "$i" --nodes "$count" --processes "$processes"
      --address "$address" --port "$port" "$@")
    (
      code=0
      connect "${machines[i]}" "cd $(printf '%q' "$directory") && exec$(printf ' %q' "${command[@]}")" \
        <"$folder/$i.in" || code=$?
      echo "$code" >"$folder/$i.code"
    ) &
  done
  pipes=()
  for ((i = 0; i < count; i++)); do
    exec {pipe}>"$folder/$i.in"
    pipes+=("$pipe")
  done
}

send() {
  local pipe
  for pipe in "${pipes[@]}"; do
    # in a subshell, because writing to a closed pipe ends the shell
    (echo "$1" >&"$pipe") 2>/dev/null || true
  done
}

# Waits for all machines. Sets `failed` to the exit code of the first that failed, or 0.
finish() {
  local i code ended=0 deadline=0
  failed=0
  while [ "$ended" -lt "$count" ]; do
    ended=0
    for ((i = 0; i < count; i++)); do
      [ -s "$folder/$i.code" ] || continue
      ended=$((ended + 1))
      code=$(<"$folder/$i.code")
      if [ "$code" -ne 0 ] && [ "$failed" -eq 0 ]; then
        failed=$code deadline=$((SECONDS + grace + 5))
        case $code in
        75) ;;
        255) echo "error: ssh ${machines[i]} failed (255); stopping the other machines" >&2 && deadline=0 ;;
        *) echo "error: ${machines[i]} ended with exit code $code" >&2 ;;
        esac
      fi
    done
    if [ "$failed" -ne 0 ] && [ "$SECONDS" -ge "$deadline" ]; then
      send TERM
      [ "$SECONDS" -lt $((deadline + 30)) ] || send KILL
      deadline=$((SECONDS > deadline ? SECONDS + 5 : deadline + 5))
    fi
    sleep 0.2
  done
  for i in "${pipes[@]}"; do exec {i}>&-; done
  rm -f "$folder"/*
}

requested=''
trap 'requested=yes; send TERM' TERM INT HUP
trap 'requested=yes; send USR1' USR1

lost=0
while :; do
  start "$@"
  finish
  # 69: a process is gone; above 128: it died by a signal; 255: ssh, which is no loss if it never came to work
  if [ -n "$requested" ] || { [ "$failed" -ne 69 ] && [ "$failed" -le 128 ]; } ||
    { [ "$failed" -eq 255 ] && [ "$SECONDS" -lt 30 ]; }; then
    break
  fi
  # Without an answer of machine 0 it is the lost one.
  lost=$(connect "${machines[0]}" "echo lost >>$losses && wc -l <$losses") || lost=$((lost + 1))
  if [ "$lost" -gt 3 ]; then
    echo "error: a process was lost $lost times without a new checkpoint" >&2
    break
  fi
  echo "a process was lost ($lost of at most 3 times without a new checkpoint); starting again" >&2
  sleep "${RESTART_SECONDS:-20}" &
  wait $! || break # interrupted
done
[ "$lost" -eq 0 ] || connect "${machines[0]}" "rm -f $losses" || true
exit "$failed"
