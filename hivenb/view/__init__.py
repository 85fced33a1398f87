"""Everything that people look at: pictures, widgets and text, all drawn from the same state.

Only this package imports IPython, ipywidgets and matplotlib, and nothing outside of it needs it.
"""
