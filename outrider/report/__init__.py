"""Reports: one HTML file that needs nothing else, with tables and plots. `page.py` lays out, `plots.py` draws.

    from outrider.report.page import Section, Table, page, save
    from outrider.report.plots import Series, line_plot

    loss = line_plot("Loss", ("step", "nats"), [Series("held out", steps, losses)])
    save(Path("report.html"), page("Training", [Section("Loss", "Over all positions.", plots=(loss,))], facts))

Neither is imported by anything that serves: matplotlib takes half a second to load.
"""
