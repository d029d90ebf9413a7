#!/usr/bin/env bash
# Does verl with vLLM work here? Three steps of GRPO on one GPU; it may take five
# minutes to start.
#
#   smoke.sh FOLDER [RUN ...]
#
# RUN: jetrl (default), jetrl_fp8wire, jetrl_exact, verl_bf16 or verl_fp8. A random model
# of four layers, and few questions of reasoning-gym, or DATA (a folder with train.parquet
# and val.parquet). PROVIDERS ([scaled_mm,triton]; "" for the default order, which compiles
# DeepGEMM's kernels first), LIMIT (900 seconds a run), OPTIONS (of verl) and PYTHON may be
# set. Prints what was checked and how long phases took; logs stay in FOLDER.
set -euo pipefail

if [ $# -lt 1 ]; then
  sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
python=${PYTHON:-python}
[ -f "$folder/model/config.json" ] ||
  "$python" -m jetrl_compile.examples.verl_grpo.make_model small "$folder/model"
if [ ! -f "$folder/data/train.parquet" ]; then
  mkdir -p "$folder/data"
  if [ -n "${DATA:-}" ]; then cp "$DATA"/*.parquet "$folder/data"; else
    "$python" -m jetrl_compile.examples.verl_grpo.make_data "$folder/data" --train 64
  fi
fi

shown='step:[0-9]+ - |(rollout_corr/k3_kl|training/rollout_probs_diff_max'
shown+='|actor/jetrl/[a-z0-9_]+|timing_s/[a-z_]+):[-+.0-9a-z()]+'
failed=0
for name in "${@:-jetrl}"; do
  recipe=jetrl wire=bf16 exact=0 options=()
  case $name in
    jetrl) ;;
    jetrl_fp8wire) wire=fp8 ;;
    jetrl_exact) exact=1 ;;
    verl_bf16 | verl_fp8) recipe=$name ;;
    *) echo "no run is called $name" >&2 && exit 2 ;;
  esac
  providers=${PROVIDERS-[scaled_mm,triton]} warm=1
  [[ $recipe == jetrl && -n $providers ]] && warm=0 && options+=(
    "+actor_rollout_ref.model.override_config.jetrl_providers=$providers")
  run=$folder/$name
  rm -rf "$run" && mkdir -p "$run/data" && cp "$folder"/data/*.parquet "$run/data"
  status=0
  WIRE=$wire EXACT=$exact WARM=$warm GPUS=1 STEPS=3 BATCH=8 RESPONSE=64 MICRO=16 \
    KL=True SAVE=-1 timeout --kill-after=5 "${LIMIT:-900}" \
    bash "$here/hopper.sh" "$folder/model" "$recipe" "$run" \
    trainer.resume_mode=disable 'trainer.logger=["console","file"]' \
    actor_rollout_ref.rollout.cudagraph_capture_sizes='[1,8,64]' \
    actor_rollout_ref.rollout.ignore_eos=True actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.agent.num_workers=1 reward.num_workers=1 \
    reward.custom_reward_function.name=digit_share \
    ${options[@]+"${options[@]}"} ${OPTIONS:-} >"$run.log" 2>&1 || status=$?
  echo "$name: exit status $status, $run.log"
  grep -aoE "$shown" "$run.log" | tr '\n' ' ' | sed 's/step:/\n  step:/g' || true
  echo
  if [ $status -ne 0 ]; then
    failed=1
    tail -n 20 "$run.log" | cut -c1-200
  fi
done
exit $failed
