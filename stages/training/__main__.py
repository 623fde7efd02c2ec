"""``python -m stages.training``: the training's steps, in the order in which they are listed."""

import argparse
import os
from pathlib import Path


def main() -> None:
    """Run one step."""
    arguments = _parser().parse_args()
    # Before torch is imported: OpenMP's threads spin, and on a busy machine that is all they do.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    match arguments.step:
        case "vae":
            from stages.training import autoencoder

            autoencoder.train(work, minutes=arguments.minutes, resume_at=arguments.resume_at)
        case "latents":
            from stages.training import transformer

            transformer.encode_training_clips(
                work, part=arguments.part, parts=arguments.parts, clips=arguments.clips
            )
        case "dit":
            from stages.training import transformer

            transformer.train(work, minutes=arguments.minutes)
        case "eval":
            from stages.training import evaluation

            evaluation.evaluate(
                arguments.model or work / "pipeline",
                work,
                clips=arguments.clips,
                steps=arguments.steps,
                guidance=arguments.guidance,
            )
        case "still":
            from stages.training import still

            still.write(arguments.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages.training", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("out/training"), help="folder of the run")
    steps = parser.add_subparsers(dest="step", required=True)
    vae = steps.add_parser("vae", help="train the autoencoder")
    vae.add_argument("--minutes", type=float, default=16.0)
    vae.add_argument("--resume-at", type=float, default=0.0, help="go on at this share of the schedule")
    latents = steps.add_parser("latents", help="encode the training clips, once; parts may run side by side")
    latents.add_argument("--part", type=int, default=0)
    latents.add_argument("--parts", type=int, default=1)
    latents.add_argument("--clips", type=int, default=3000)
    dit = steps.add_parser("dit", help="train transformer, text encoder and image encoder")
    dit.add_argument("--minutes", type=float, default=20.0)
    evaluation = steps.add_parser("eval", help="measure on held-out digits and draw sheets")
    evaluation.add_argument("--model", type=Path, help="a pipeline's folder; by default the run's")
    evaluation.add_argument("--clips", type=int, default=40)
    evaluation.add_argument("--steps", type=int, default=8)
    evaluation.add_argument("--guidance", type=float, default=1.0)
    still = steps.add_parser("still", help="draw the demo's first frame, a held-out digit")
    still.add_argument("output", type=Path)
    return parser


if __name__ == "__main__":
    main()
