#!/usr/bin/env bash
# GRPO with verl 0.9.1 and vLLM 0.24 on the Hopper GPUs of one host.
#
#   hopper.sh MODEL RECIPE [FOLDER] [verl options ...]
#
# MODEL is a folder or "smollm2"; RECIPE is jetrl, jetrl_paper, rollout_only or bf16.
# GPUS (all), STEPS (60), RESPONSE (1024 tokens), TASK (letter_counting), SEED (0),
# LEVEL (3) and PYTHON (python) may be set. FSDP2 shards the trainer over all GPUs; every
# GPU has a rollout replica of its own. Run it again to resume from the last checkpoint:
# each part of a run has a log of its own in FOLDER/logs, and curves.py joins them.
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=$1 recipe=$2
shift 2
folder=runs/$(basename "$model")-$recipe-seed${SEED:-0}
if [ $# -gt 0 ] && [[ $1 != *=* ]]; then folder=$1 && shift; fi
folder=$(mkdir -p "$folder" && cd "$folder" && pwd)
python=${PYTHON:-python} steps=${STEPS:-60} response=${RESPONSE:-1024}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}

if [ "$model" = smollm2 ]; then
  model=$folder/model
  [ -f "$model/config.json" ] ||
    "$python" -m jetrl_compile.examples.verl_grpo.make_model smollm2 "$model"
fi
[ -f "$folder/data/train.parquet" ] ||
  "$python" -m jetrl_compile.examples.verl_grpo.make_data "$folder/data" \
    --task "${TASK:-letter_counting}" --train 4096 --seed "${SEED:-0}"

# A recipe without FP8 rollouts runs vLLM as it comes.
quantization=()
case $recipe in
  bf16) ;;
  *) quantization=(
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=jetrl"
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.jetrl.recipe=$recipe"
  ) ;;
esac
# rollout_only is not contained, which is what it is there to show.
violation=stop
[ "$recipe" = rollout_only ] && violation=warn

mkdir -p "$folder/logs"
part=$(printf '%03d' "$(find "$folder/logs" -name 'part*.jsonl' | wc -l)")
export VERL_FILE_LOGGER_PATH=$folder/logs/part$part.jsonl
export TENSORBOARD_DIR=$folder/tensorboard TOKENIZERS_PARALLELISM=false
export DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$folder/deep_gemm}

hf=actor_rollout_ref.model actor=actor_rollout_ref.actor
rollout=actor_rollout_ref.rollout ref=actor_rollout_ref.ref
"$python" -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$folder/data/train.parquet" \
  data.val_files="$folder/data/val.parquet" \
  data.train_batch_size=32 data.max_prompt_length=512 \
  data.max_response_length="$response" data.seed="${SEED:-0}" \
  $hf.path="$model" $hf.external_lib=jetrl_compile.integrations.verl \
  +$hf.override_config.attn_implementation=sdpa \
  +$hf.override_config.jetrl_recipe="$recipe" \
  +$hf.override_config.jetrl_level="${LEVEL:-3}" \
  +$hf.override_config.jetrl_on_violation=$violation \
  +$hf.override_config.jetrl_reports="$folder/reports" \
  $hf.use_remove_padding=False $hf.enable_gradient_checkpointing=True \
  $actor.strategy=fsdp2 $ref.strategy=fsdp2 \
  $actor.optim.lr=1e-6 $actor.ppo_mini_batch_size=32 \
  $actor.ppo_micro_batch_size_per_gpu=8 $actor.use_kl_loss=False \
  $ref.log_prob_micro_batch_size_per_gpu=8 \
  $rollout.name=vllm $rollout.n=8 $rollout.tensor_model_parallel_size=1 \
  $rollout.gpu_memory_utilization=0.4 $rollout.seed="${SEED:-0}" \
  $rollout.log_prob_micro_batch_size_per_gpu=8 $rollout.calculate_log_probs=True \
  "${quantization[@]}" \
  reward.custom_reward_function.path="$here/reward.py" \
  reward.custom_reward_function.name=verified \
  trainer.logger='["console","file","tensorboard"]' \
  trainer.project_name=jetrl trainer.experiment_name="$(basename "$folder")" \
  trainer.nnodes=1 trainer.n_gpus_per_node="$gpus" trainer.val_before_train=False \
  trainer.test_freq=-1 trainer.save_freq=10 trainer.resume_mode=auto \
  trainer.max_actor_ckpt_to_keep=1 trainer.total_epochs=1000 \
  trainer.total_training_steps="$steps" \
  trainer.default_local_dir="$folder/checkpoints" "$@"

"$python" -m jetrl_compile.examples.verl_grpo.curves "$folder" --out "$folder/curves"
