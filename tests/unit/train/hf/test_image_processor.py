"""Images become inputs as the model's own directory says, and an export says what training did."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import save
from phalanx.data import DataInfo
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe
from phalanx.run import Run
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.hf.image_processor import ImageNormalization, find_image_inputs, from_meta
from phalanx.train.tasks import Classification, open_task

transformers: Any = pytest.importorskip("transformers")
PIL: Any = pytest.importorskip("PIL.Image")

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
VIT = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 32, "width": 32},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": MEAN,
    "image_std": STD,
}
FACTS = DataInfo("images", None, 2, None, (32, 32, 3))


def directory(folder: Path, processor: dict[str, Any] | None, file: str = "preprocessor_config.json") -> str:
    """A model's directory with this preprocessing, as `model.build` names it."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "vit"}')
    if processor is not None:
        (folder / file).write_text(json.dumps(processor))
    return f"hf:{folder.name}"


def inputs_of(build: str, folder: Path, images: np.ndarray) -> torch.Tensor:
    recipe = Recipe.model_validate({"name": "x", "model": {"build": build}, "task": "classification"})
    task = open_task(recipe, folder, FACTS)
    assert isinstance(task, Classification)
    (pixels,), _ = task.inputs({"images": torch.from_numpy(images)})
    return pixels


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    "changes", [{}, {"rescale_factor": 1 / 127.5}, {"do_rescale": False}, {"do_normalize": False}], ids=str
)
def test_pixel_values_are_those_of_the_models_own_preprocessing(
    tmp_path: Path, file: str, changes: dict[str, Any]
) -> None:
    processor = {**VIT, **changes}
    nested = {"image_processor": processor} if file == "processor_config.json" else processor
    build = directory(tmp_path / "vit", nested, file)
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    own = transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit")
    expected = own([PIL.fromarray(image) for image in images], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(inputs_of(build, tmp_path, images), expected.float(), rtol=1e-5, atol=1e-5)


def test_a_directory_without_preprocessing_gets_values_from_minus_one_to_one(tmp_path: Path) -> None:
    build = directory(tmp_path / "vit", None)
    images = np.array([0, 255], np.uint8).reshape(1, 1, 2, 1).repeat(3, axis=3)
    assert inputs_of(build, tmp_path, images).unique().tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"size": {"height": 64, "width": 64}},
            r"images are 32 x 32, but .*preprocessor_config.json says 64 x 64 \(size",
        ),
        ({"size": 64}, "says 64 x 64"),
        ({"do_center_crop": True, "crop_size": {"height": 24, "width": 24}}, r"says 24 x 24 \(crop_size\)"),
        ({"image_mean": [0.5]}, None),
        ({"image_mean": [0.5, 0.5]}, "images have 3 channels, but image_mean of .* has 2 values"),
    ],
    ids=str,
)
def test_images_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    crop = "do_center_crop" in changes
    kind = {"image_processor_type": "CLIPImageProcessor"} if crop else {}
    build = directory(tmp_path / "vit", {**VIT, **kind, **changes})
    if message is None:
        assert find_image_inputs(build, tmp_path, FACTS) is not None
        return
    with pytest.raises(RecipeError, match=message):
        find_image_inputs(build, tmp_path, FACTS)


def test_what_is_not_followed_is_named(tmp_path: Path) -> None:
    clip = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 36}, "resample": 3}
    crop = {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}}
    build = directory(tmp_path / "clip", {**VIT, **clip, **crop})
    inputs = find_image_inputs(build, tmp_path, FACTS)
    assert inputs is not None
    assert set(inputs.not_followed) == {"do_center_crop", "size.shortest_edge", "resample=3"}


def test_an_export_says_what_training_made_of_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=16
    )
    model = transformers.ViTForImageClassification(config).eval()
    origin = {"directory": str(tmp_path), "names": {}, "converted": [], "tied": {}}
    described = {"build": "hf:vit", "args": {}, "huggingface": {**origin, "config": config.to_dict()}}
    described["huggingface"]["config"]["architectures"] = ["ViTForImageClassification"]
    normalization = ImageNormalization(1 / 255, tuple(MEAN), tuple(STD))
    run = Run(tmp_path / "run")
    run.create()
    run.plan.write_text(json.dumps({"data_info": vars(FACTS)}))
    meta = {"model": described, "image_normalization": asdict(normalization)}
    assert from_meta(json.loads(json.dumps(meta["image_normalization"]))) == normalization
    out = export_huggingface(save(run.checkpoints, 1, dict(model.state_dict()), meta), tmp_path / "out")
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    pixels = normalization.apply_(torch.from_numpy(image).permute(2, 0, 1)[None].float())
    with torch.no_grad():
        expected = model(pixels).logits.softmax(-1)[0].max()
    best = transformers.pipeline("image-classification", str(out))(PIL.fromarray(image))[0]
    assert best["score"] == pytest.approx(float(expected), abs=1e-5)
