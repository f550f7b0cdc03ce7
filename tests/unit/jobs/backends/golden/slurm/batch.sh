#!/bin/bash
#SBATCH --job-name=gpt-python
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --time=1440
#SBATCH --signal=B:USR1@120
#SBATCH --nice=5
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --export=HOME,LANG,LD_LIBRARY_PATH,LOGNAME,PATH,SHELL,TMPDIR,USER
#SBATCH --partition=main
#SBATCH --account=lab
#SBATCH --switches=1@02:00:00
#SBATCH "--comment=of \"today\" \\ %j"
#SBATCH "--chdir=/shared/my work"
#SBATCH --output=/home/me/state/slurm/gpt-python-0123abcd/log
# Job gpt-python, one attempt: Slurm starts this on the first of its nodes.
set -o pipefail
trap : TERM # a request to stop the job must not end this script, which records the result
warned=
trap 'warned=1' USR1 # the step has not started yet

# shellcheck disable=SC2016 # names are meant as they stand
folder=/home/me/state/slurm/gpt-python-0123abcd options=(--cpus-per-task=96 --container-image=/shared/image.sqsh '--container-mounts=/data:/data:ro,/home/me/state/slurm/gpt-python-0123abcd:/home/me/state/slurm/gpt-python-0123abcd,/shared/my work:/shared/my work' '--container-workdir=/shared/my work')
attempt=${SLURM_RESTART_COUNT:-0}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# below the kernel's ephemeral ports; a different one for each attempt
port=$((20000 + (SLURM_JOB_ID + attempt) % 10000))
while (: <"/dev/tcp/${nodes[0]}/$port") 2>/dev/null; do port=$((port + 1)); done

# a new name for each attempt: no node can have old contents in its cache
rm -f "$folder"/token.* "$folder"/code.*
token=$folder/token.$attempt
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$token")

export PHALANX_NUM_NODES=${#nodes[@]} PHALANX_LEADER_ADDR=${nodes[0]}:$port PHALANX_TOKEN_FILE=$token
export SRUN_CPUS_PER_TASK=96

srun --input=none --export=ALL --kill-on-bad-exit=1 --wait=60 \
  --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 "${options[@]}" \
  bash "$folder/node.sh" "$attempt" &
step=$!

# The warning signal reaches only this shell. Forward it when the step has started and its command handles signals;
# before that the signal would end it.
begun=$EPOCHSECONDS
# shellcheck disable=SC2317 # the trap calls it
running() { kill -0 "$step" 2>/dev/null; }
# shellcheck disable=SC2317
warn() {
  while running && ! scontrol show step "$SLURM_JOB_ID.0" >/dev/null 2>&1; do sleep 1 && begun=$EPOCHSECONDS; done
  while running && ((EPOCHSECONDS - begun < 5)); do sleep 1; done
  while running && ! scancel --signal=USR1 "$SLURM_JOB_ID.0" 2>/dev/null; do sleep 1; done
}
trap warn USR1
if [[ -n $warned ]]; then warn; fi

while running; do wait "$step"; done # a signal ends `wait`, too
wait "$step"
code=$?

# The exit code of the job is that of the first node, the leader. If it was killed because another node failed, take
# that node's code.
leader=
unfit=()
others=
for node in "${nodes[@]}"; do
  read -r one 2>/dev/null <"$folder/code.$attempt.$node" || one=
  [[ $node == "${nodes[0]}" ]] && leader=$one
  [[ $one == 77 ]] && unfit+=("$node")
  [[ -z $others && -n $one && $one != 0 && $one != 75 && $one -lt 128 ]] && others=$one
done
if [[ -n $leader ]]; then code=$leader; elif [[ $code == 0 ]]; then code=75; fi # a finished leader records 0
if ((${#unfit[@]} > 0 && (code >= 128 || code == 75))); then code=77; fi
if [[ -n $others && $code -ge 128 ]]; then code=$others; fi

# A killed job is restarted, but only a few times in a row, since it may need more memory. An srun that cannot start the
# step, as right after a node came back, may end with a code above 192.
deaths=0
if ((code > 128 && code <= 192)) || [[ -z $leader$others && $code -gt 192 ]]; then
  if ((EPOCHSECONDS - begun < 600)); then read -r deaths 2>/dev/null <"$folder/deaths" || deaths=0; fi
  deaths=$((deaths + 1))
fi
printf '%s\n' "$deaths" >"$folder/deaths"

printf 'code %s\nattempt %s\nnodes %s\nended %s\n' "$code" "$attempt" "${nodes[*]}" "$EPOCHSECONDS" \
  >"$folder/result.new"
mv "$folder/result.new" "$folder/result"

cancelled() {
  [[ -e $folder/cancelled ]] || scontrol show job "$SLURM_JOB_ID" | grep '^ *JobState=CANCELLED' >/dev/null
}
ask() {
  local up
  for _ in {1..60}; do # the controller may be restarting
    up=$(scontrol ping | grep -cw UP)
    scontrol "$1" "$SLURM_JOB_ID" && exit "$code"
    if ((up > 0)); then break; fi
    sleep 5
  done
}
if ((deaths >= 3)); then
  echo "killed $deaths times in a row (exit code $code): not restarted; it may need more memory"
elif [[ $code == 75 || $code == 77 || $deaths != 0 ]] && ((attempt < 7)) && ! cancelled; then
  if [[ $code != 77 ]]; then
    ask requeue
  else
    # the process that polls the job excludes these nodes and releases it; a running job cannot exclude nodes
    printf '%s\n' "${unfit[@]}" >"$folder/unfit"
    ask requeuehold
  fi
fi
rm -f "$folder"/token.* "$folder/secrets.sh"
exit "$code"
