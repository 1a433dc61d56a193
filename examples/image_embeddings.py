"""Embed images with CLIP in a Ray Data pipeline and in a WorkerGroup, and compare the embeddings.

    python examples/image_embeddings.py                                   # photographs, random weights
    python examples/image_embeddings.py --model openai/clip-vit-base-patch32 --images my/photos

Writes Parquet and a contact sheet of nearest neighbors to ``--out``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from image_tools import (
    RANDOM,
    EmbeddingWorker,
    EmbedImages,
    choose_model,
    contact_sheet,
    make_images,
    nearest,
)
from PIL import Image

import phalanx as px


def add_class(row: dict[str, Any]) -> dict[str, Any]:
    """Add the name of the image's folder."""
    return {**row, "class": Path(row["path"]).parent.name}


def cpus_per_actor(cluster_cpus: float, concurrency: int) -> float:
    """Return the CPUs that each actor of a pool may reserve so that a CPU is left to read images.

    A pool whose actors reserve every CPU waits for the tasks that feed it, and these wait for a CPU: a deadlock without
    an error.
    """
    return min(1.0, max(cluster_cpus - 1, 0.0) / concurrency)


def check_accelerator(accelerator_type: str | None) -> None:
    """Raise if no node has the accelerator type, for which Ray would wait forever."""
    prefix = "accelerator_type:"
    known = sorted(name.removeprefix(prefix) for name in ray.cluster_resources() if name.startswith(prefix))
    if accelerator_type is not None and accelerator_type not in known:
        raise SystemExit(
            f"--accelerator-type {accelerator_type}: the cluster has {', '.join(known) or 'no accelerators'}; "
            "choose one of those, or leave it out"
        )


def pipeline(images: Path, model: str, args: argparse.Namespace) -> ray.data.Dataset:
    """Return the pipeline: read, add the class, embed, drop the pixels. It runs when rows are requested."""
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= args.concurrency else 0
    cpus = cpus_per_actor(ray.cluster_resources()["CPU"], args.concurrency)
    dataset = ray.data.read_images(str(images), include_paths=True, shuffle="files", mode="RGB")
    dataset = dataset.map(add_class)
    dataset = dataset.map_batches(
        EmbedImages,
        fn_constructor_kwargs={"model": model, "device": "cuda" if gpus else "cpu"},
        compute=ray.data.ActorPoolStrategy(size=args.concurrency),  # `concurrency=` up to Ray 2.50
        batch_size=args.batch_size,
        num_cpus=cpus,
        num_gpus=gpus,
        accelerator_type=args.accelerator_type,
    )
    return dataset.drop_columns(["image"])


def by_worker_group(paths: list[Path], model: str, ranks: int) -> Any:
    """Return the embeddings of the same images, in the order of ``paths``."""
    images = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    with px.ResourcePool([ranks]) as pool, px.WorkerGroup(pool, EmbeddingWorker.bind(model)) as group:
        return group.embed(images)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--images", type=Path, help="folder of <class>/<image>; default: photographs, cropped"
    )
    parser.add_argument("--model", help="CLIP from the hub or a folder; default: random weights")
    parser.add_argument("--out", type=Path, default=Path("out/image_embeddings"))
    parser.add_argument("--per-class", type=int, default=12, help="crops of each photograph")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=2, help="actors that embed, and ranks")
    parser.add_argument("--accelerator-type", help='such as "T4"')
    parser.add_argument("--num-cpus", type=int, help="of a cluster started here; default: the machine's")
    parser.add_argument("--neighbors", type=int, default=5)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    px.init(backend="ray", num_cpus=args.num_cpus)
    check_accelerator(args.accelerator_type)
    model = choose_model(args.model)
    if model == RANDOM:
        print("no CLIP was given or downloaded before: a small one with random weights is used (see --model)")
    images = args.images or args.out / "images"
    if args.images is None:
        print(f"made {len(make_images(images, args.per_class))} JPEGs in {images}")

    target = args.out / "embeddings"
    pipeline(images.resolve(), model, args).write_parquet(
        str(target.resolve()), mode=ray.data.SaveMode.OVERWRITE
    )
    table = ray.data.read_parquet(str(target.resolve())).to_pandas().sort_values("path")
    paths, classes = [Path(path) for path in table["path"]], list(table["class"])
    embeddings = np.stack(list(table["embedding"]))
    print(f"wrote {len(paths)} embeddings of {embeddings.shape[1]} numbers to {target}")

    difference = float(np.abs(by_worker_group(paths, model, args.concurrency) - embeddings).max())
    print(f"a WorkerGroup of {args.concurrency} ranks gives the same: largest difference {difference:.1e}")
    if difference > 1e-5:
        raise SystemExit("the embeddings differ by more than 1e-5")

    queries = [classes.index(name) for name in sorted(set(classes))]
    found = nearest(embeddings, queries, args.neighbors)
    sheet = args.out / "neighbors.png"
    rows = [
        [paths[query], *(paths[other] for other in others)]
        for query, others in zip(queries, found, strict=True)
    ]
    contact_sheet(rows, lambda path: path.parent.name, sheet)
    same = sum(
        classes[other] == classes[query]
        for query, others in zip(queries, found, strict=True)
        for other in others
    )
    print(f"of {len(queries) * args.neighbors} neighbors {same} are of their query's class: {sheet}")
    px.shutdown()


if __name__ == "__main__":
    main()
