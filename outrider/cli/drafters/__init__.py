"""The commands `outrider drafters …`; each is loaded when it is called, for most of them load models."""

from cyclopts import App

app = App(name="drafters", help="Make, measure and choose drafters.")
app.command(
    "outrider.cli.drafters.compare:compare", help="Measure drafters beside plain decoding, on prompts of your own."
)
app.command("outrider.cli.drafters.train:train", help="Train a draft for a target, on text the target wrote.")
app.command(
    "outrider.cli.drafters.search_layers:search_layers",
    name="search-layers",
    help="Find the layers of a target that make the best draft of it.",
)
