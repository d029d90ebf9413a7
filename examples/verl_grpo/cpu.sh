#!/usr/bin/env bash
# GRPO with verl's own trainer on a CPU: a tiny random model, FSDP2 over gloo, FP8 on
# both sides. It shows that a config works, not that a model learns.
#
#   cpu.sh [FOLDER] [verl options ...]
#
# RECIPE (jetrl), EXACT (0; 1: exact mode), RANKS (1), STEPS (2) and PYTHON (python) may
# be set. The run's folder holds the model, the data, and reports/ with the containment
# report.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mkdir -p "${1:-verl-cpu}" && cd "${1:-verl-cpu}" && pwd)
shift || true
python=${PYTHON:-python} recipe=${RECIPE:-jetrl} ranks=${RANKS:-1} steps=${STEPS:-2}
attention=jetrl_reference exact=False
[ "${EXACT:-0}" = 1 ] && attention=jetrl_exact exact=True

# The CPU platform and rollout, in every process of the run.
export VERL_PLATFORM=cpu
modules=jetrl_compile.integrations.verl_cpu
export VERL_USE_EXTERNAL_MODULES=$modules${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 HYDRA_FULL_ERROR=1
# A CPU worker compiles where it is: torch's pool of compile processes only costs memory.
export TORCHINDUCTOR_COMPILE_THREADS=1
# Ray's own folder holds sockets, whose paths must be short.
export RAY_TMPDIR=${RAY_TMPDIR:-$(mktemp -d /tmp/jetrl-ray.XXXXXX)}

if [ ! -f "$folder/model/config.json" ]; then
  "$python" -m jetrl_compile.examples.verl_grpo.make_model tiny "$folder/model"
  "$python" -m jetrl_compile.examples.verl_grpo.make_data "$folder/data" \
    --train 64 --val 4
fi

model=actor_rollout_ref.model actor=actor_rollout_ref.actor
rollout=actor_rollout_ref.rollout ref=actor_rollout_ref.ref
cd "$folder"
exec "$python" -W ignore -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$folder/data/train.parquet" \
  data.val_files="$folder/data/val.parquet" \
  data.train_batch_size=4 data.max_prompt_length=320 data.max_response_length=12 \
  data.dataloader_num_workers=0 \
  $model.path="$folder/model" \
  $model.external_lib=jetrl_compile.integrations.verl \
  +$model.override_config.attn_implementation=$attention \
  +$model.override_config.jetrl_exact=$exact \
  +$model.override_config.jetrl_recipe="$recipe" \
  +$model.override_config.jetrl_lowering=aot \
  +$model.override_config.jetrl_reports="$folder/reports" \
  $model.use_remove_padding=True $model.enable_gradient_checkpointing=True \
  $actor.strategy=fsdp2 $ref.strategy=fsdp2 \
  $actor.optim.lr=1e-3 $actor.ppo_mini_batch_size=4 \
  $actor.ppo_micro_batch_size_per_gpu=4 \
  $actor.use_kl_loss=True $actor.entropy_coeff=0 \
  $actor.use_torch_compile=False $actor.fsdp_config.use_torch_compile=False \
  $ref.log_prob_micro_batch_size_per_gpu=4 $ref.fsdp_config.use_torch_compile=False \
  $rollout.name=jetrl_cpu $rollout.n=2 $rollout.tensor_model_parallel_size=1 \
  $rollout.log_prob_micro_batch_size_per_gpu=4 $rollout.calculate_log_probs=True \
  $rollout.agent.num_workers=1 $rollout.load_format=auto \
  $rollout.free_cache_engine=False \
  reward.custom_reward_function.path="$here/reward.py" \
  reward.custom_reward_function.name=digit_share reward.num_workers=1 \
  trainer.logger='["console"]' trainer.nnodes=1 trainer.n_gpus_per_node="$ranks" \
  trainer.device=cpu trainer.val_before_train=False trainer.test_freq=-1 \
  trainer.save_freq=-1 trainer.resume_mode=disable trainer.total_epochs=1 \
  trainer.total_training_steps="$steps" \
  trainer.default_local_dir="$folder/checkpoints" \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  +ray_kwargs.ray_init.num_gpus="$ranks" ray_kwargs.ray_init.num_cpus=16 \
  +ray_kwargs.ray_init.include_dashboard=False "$@"
