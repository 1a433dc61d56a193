# Chapter 1 of verl's published tutorial of its Ray API, cell by cell. Nothing of verl is used in it yet.
# A comment "adapted: ..." follows each line that differs from what was published, and says in what.
import os
import warnings

import ray
import torch

warnings.filterwarnings("ignore")

ray.init(num_cpus=4, num_gpus=1, resources={"accelerator_type:T4": 1})  # adapted: ray.init counts


@ray.remote(memory=500 * 1024 * 1024)
class Accumulator:
    def __init__(self):
        self.value = 0

    def add(self, x):
        self.value += x

    def get_value(self):
        return self.value


accumulator = Accumulator.remote()

value_ref = accumulator.get_value.remote()
value = ray.get(value_ref)
print(value)

accumulator.add.remote(10000)
new_value = ray.get(accumulator.get_value.remote())
print(new_value)

print(ray.cluster_resources())  # adapted: backend (the shell's `ray status`)

ds = ray.data.read_images(
    os.environ["TUTORIAL_FILES"] + "/doggos-dataset/train",  # adapted: paths
    include_paths=True,
    shuffle="files",
)


def add_class(row):
    row["class"] = row["path"].rsplit("/", 3)[-2]
    return row


ds = ds.map(
    add_class,
    num_cpus=1,
    num_gpus=0,
    concurrency=1,  # adapted: ray.init counts (as many as there are CPUs for)
)

import numpy as np
from PIL import Image
from transformers import CLIPModel, CLIPProcessor


class EmbedImages:
    def __init__(self, model_id, device):
        self.processor = CLIPProcessor.from_pretrained(model_id)
        self.model = CLIPModel.from_pretrained(model_id)
        print("load model success.")
        self.model.to(device)
        self.device = device

    def __call__(self, batch):
        images = [Image.fromarray(np.uint8(img)).convert("RGB") for img in batch["image"]]
        inputs = self.processor(images=images, return_tensors="pt").to(self.device)  # adapted: arguments
        with torch.inference_mode():
            features = self.model.get_image_features(**inputs)
            batch["embedding"] = features.pooler_output.cpu().numpy()  # adapted: arguments (transformers 5)
        return batch


embeddings_ds = ds.map_batches(
    EmbedImages,
    fn_constructor_kwargs={
        "model_id": os.environ["TUTORIAL_FILES"] + "/clip",  # adapted: paths
        "device": "cpu",  # adapted: device
    },
    fn_kwargs={},
    compute=ray.data.ActorPoolStrategy(size=1),  # adapted: arguments (concurrency=), ray.init counts
    batch_size=64,
    num_gpus=1,
    accelerator_type="T4",
)
embeddings_ds = embeddings_ds.drop_columns(["image"])

print(embeddings_ds.take(1))

ray.shutdown()
