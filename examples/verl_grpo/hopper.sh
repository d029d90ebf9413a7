#!/usr/bin/env bash
# GRPO with verl 0.9.1 and vLLM 0.24 on the Hopper GPUs of one host.
#
#   hopper.sh MODEL RECIPE [FOLDER] [verl options ...]
#
# MODEL is a folder or "smollm2"; RECIPE is jetrl, jetrl_paper, rollout_only, bf16, or
# verl as it comes: verl_bf16, and verl_fp8 with verl's own FP8 rollouts. May be set:
# GPUS (all), STEPS (60), BATCH (32 prompts), RESPONSE (1024 tokens), MICRO (8 sequences
# a GPU), LR (1e-6), MEMORY (0.4 of a GPU for vLLM), TASK (basic_arithmetic; counting has
# answers of 600 to 1000 tokens), SEED (0), LEVEL (3), WIRE (bf16 or fp8), EXACT (1: jetrl
# and jetrl_paper run exact mode; 0: they do not), KL (False; True: a reference model),
# RESIDENT (True: its parameters stay on the GPU; False: on the host, as with verl), SAVE
# (10 steps), WARM (1: DeepGEMM's kernels are compiled first; 0: where they are first used,
# seconds each), PYTHON.
#
# FSDP2 shards the trainer over all GPUs; every GPU has a rollout replica of its own. Run
# it again to resume from the last checkpoint: each part of a run has a log of its own in
# FOLDER/logs, and curves.py joins them.
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
for name in EXACT WARM; do
  case ${!name:-1} in 0 | 1) ;; *) echo "$name is '${!name}'; use 0 or 1" >&2 && exit 2 ;; esac
done
for name in RESPONSE MICRO; do
  [[ ${!name:-1} =~ ^[1-9][0-9]*$ ]] || { echo "$name is '${!name}'; use a number" >&2 && exit 2; }
done
case $2 in
  jetrl | jetrl_paper | rollout_only | bf16 | verl_bf16 | verl_fp8) ;;
  *) echo "no recipe here is called '$2'" >&2 && exit 2 ;;
esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=$1 recipe=$2
shift 2
folder=runs/$(basename "$model")-$recipe-seed${SEED:-0}
if [ $# -gt 0 ] && [[ $1 != *=* ]]; then folder=$1 && shift; fi
folder=$(mkdir -p "$folder" && cd "$folder" && pwd)
python=${PYTHON:-python} steps=${STEPS:-60} response=${RESPONSE:-1024} prompt=512
batch=${BATCH:-32} micro=${MICRO:-8} seed=${SEED:-0}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}

if [ "$model" = smollm2 ]; then
  model=$folder/model
  [ -f "$model/config.json" ] ||
    "$python" -m jetrl_compile.examples.verl_grpo.make_model smollm2 "$model"
fi
[ -f "$folder/data/train.parquet" ] ||
  "$python" -m jetrl_compile.examples.verl_grpo.make_data "$folder/data" \
    --task "${TASK:-basic_arithmetic}" --train 4096 --seed "$seed"

hf=actor_rollout_ref.model actor=actor_rollout_ref.actor
rollout=actor_rollout_ref.rollout ref=actor_rollout_ref.ref
options=() attention=sdpa packed=False warm=()
case $recipe in
  verl_bf16) ;;
  verl_fp8) options+=("$rollout.quantization=fp8") ;;
  *)
    # rollout_only is not contained, which is what it is there to show.
    violation=stop
    [ "$recipe" = rollout_only ] && violation=warn
    options+=(
      "$hf.external_lib=jetrl_compile.integrations.verl"
      "+$hf.override_config.jetrl_recipe=$recipe"
      "+$hf.override_config.jetrl_level=${LEVEL:-3}"
      "+$hf.override_config.jetrl_wire=${WIRE:-bf16}"
      "+$hf.override_config.jetrl_resident_reference=${RESIDENT:-True}"
      "+$hf.override_config.jetrl_on_violation=$violation"
      "+$hf.override_config.jetrl_reports=$folder/reports"
    )
    # A recipe without FP8 rollouts runs vLLM as it comes.
    [ "$recipe" = bf16 ] || warm=(--recipe "$recipe") options+=(
      "+$rollout.engine_kwargs.vllm.quantization=jetrl"
      "+$rollout.engine_kwargs.vllm.additional_config.jetrl.recipe=$recipe"
    )
    [ "$recipe" = rollout_only ] && warm+=(--no-backward)
    # The attention of exact mode takes sequences without padding.
    [[ $recipe = jetrl* && ${EXACT:-1} = 1 ]] && attention=jetrl_exact packed=True &&
      options+=("+$hf.override_config.jetrl_exact=True") && warm+=(--exact)
    ;;
esac

mkdir -p "$folder/logs"
part=$(printf '%03d' "$(find "$folder/logs" -name 'part*.jsonl' | wc -l)")
export VERL_FILE_LOGGER_PATH=$folder/logs/part$part.jsonl
export TENSORBOARD_DIR=$folder/tensorboard TOKENIZERS_PARALLELISM=false
# Kernels that DeepGEMM has compiled are kept, for all runs; trainer and vLLM use the same.
export DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$HOME/.deep_gemm}
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
unset VLLM_ENABLE_V1_MULTIPROCESSING  # verl's engine is in processes of its own

# For batches of these settings; verl's own options are not looked at.
if [ ${#warm[@]} -gt 0 ] && [ "${WARM:-1}" = 1 ]; then
  most=$((micro * (prompt + response)))
  [ $most -lt 8192 ] && most=8192  # what vLLM computes at once
  "$python" -m jetrl_compile.cli warm-up "$model" "${warm[@]}" --tokens "1:$most" ||
    echo "kernels are compiled where they are first used" >&2
fi

"$python" -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$folder/data/train.parquet" \
  data.val_files="$folder/data/val.parquet" \
  data.train_batch_size="$batch" data.max_prompt_length=$prompt \
  data.max_response_length="$response" data.seed="$seed" \
  data.dataloader_num_workers=0 \
  $hf.path="$model" +$hf.override_config.attn_implementation=$attention \
  $hf.use_remove_padding=$packed $hf.enable_gradient_checkpointing=True \
  $actor.strategy=fsdp2 $ref.strategy=fsdp2 \
  $actor.optim.lr="${LR:-1e-6}" $actor.ppo_mini_batch_size="$batch" \
  $actor.ppo_micro_batch_size_per_gpu="$micro" $actor.use_kl_loss="${KL:-False}" \
  $ref.log_prob_micro_batch_size_per_gpu="$micro" \
  $rollout.name=vllm $rollout.n=8 $rollout.tensor_model_parallel_size=1 \
  $rollout.gpu_memory_utilization="${MEMORY:-0.4}" $rollout.seed="$seed" \
  $rollout.max_model_len=$((prompt + response)) \
  $rollout.cudagraph_capture_sizes='[1,2,4,8,16,32,64,96,128,160,192,224,256]' \
  $rollout.log_prob_micro_batch_size_per_gpu="$micro" \
  $rollout.calculate_log_probs=True $rollout.agent.num_workers=4 \
  "${options[@]}" \
  reward.custom_reward_function.path="$here/reward.py" \
  reward.custom_reward_function.name=verified reward.num_workers=2 \
  trainer.logger='["console","file","tensorboard"]' \
  trainer.project_name=jetrl trainer.experiment_name="$(basename "$folder")" \
  trainer.nnodes=1 trainer.n_gpus_per_node="$gpus" trainer.val_before_train=False \
  trainer.test_freq=-1 trainer.save_freq="${SAVE:-10}" trainer.resume_mode=auto \
  trainer.max_actor_ckpt_to_keep=1 trainer.total_epochs=1000 \
  trainer.total_training_steps="$steps" \
  trainer.default_local_dir="$folder/checkpoints" "$@"

"$python" -m jetrl_compile.examples.verl_grpo.curves "$folder" --out "$folder/curves"
