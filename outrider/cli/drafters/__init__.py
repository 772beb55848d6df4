"""The commands `outrider drafters …`; each is loaded when it is called, for most of them load models."""

from cyclopts import App

app = App(name="drafters", help="Make, measure and choose drafters.")
app.command(
    "outrider.cli.drafters.compare:compare", help="Measure drafters beside plain decoding, on prompts of your own."
)
for _name, _help in {
    "list_": "List a cluster's draft workers, how they do, and who gets no sessions and why.",
    "detach": "Give a running cluster's sessions no such drafter any more.",
    "attach": "Undo a detach.",
    "split": "Assign a running cluster's sessions to drafters by shares.",
    "reset": "Detach and split nothing.",
}.items():
    app.command(f"outrider.cli.drafters.live:{_name}", name=_name.rstrip("_"), help=_help)
app.command("outrider.cli.drafters.train:train", help="Train a draft for a target, on text the target wrote.")
app.command(
    "outrider.cli.drafters.prompts:prompts", help="Write a file of varied prompts that a target can be trained by."
)
app.command("outrider.cli.drafters.blend:blend", help="Average a draft and what it was trained on to.")
app.command(
    "outrider.cli.drafters.search_layers:search_layers",
    name="search-layers",
    help="Find the layers of a target that make the best draft of it.",
)
