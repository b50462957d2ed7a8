import re

from workhorse.checkpoints import RunDirectory
from workhorse.train import train
from workhorse.train.report import write_report


def test_a_report_shows_the_run_and_needs_no_network(make_recipe, tmp_path):
    samples = {"every": 6, "prompts": ["<1> & "], "max_new_tokens": 4}
    result = train(make_recipe(samples=samples, eval_every=4), tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert f"{result.validation_loss:.4f}" in page
    assert f"{result.bits_per_byte:.4f}" in page
    assert "12 of 12" in page
    assert page.count("<svg") == 5  # loss, bits per byte, learning rate, gradient norm, speed
    assert "&lt;1&gt; &amp; " in page  # a sample's text cannot become markup
    assert "d_model" in page
    assert not re.search(r"(src|href)=|@import|url\(|<script", page)


def test_a_report_says_what_makes_its_curves_suspect(make_recipe, tmp_path):
    train(make_recipe(), tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    lines = run.metrics_file.read_text("utf-8").splitlines()
    skipped = '{"kind": "skipped_step", "step": 7, "loss": null, "grad_norm": null}'
    run.metrics_file.write_text("\n".join([*lines[:-1], skipped, ""]), "utf-8")
    write_report(run)
    page = run.report_file.read_text("utf-8")
    assert "1 steps were skipped, their loss or gradient not finite: 7" in page
    assert "the run has not finished" in page
