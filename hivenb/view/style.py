"""The dashboard's style sheet, and the small pieces of HTML that its panels share.

Colours come from JupyterLab's variables where there are any, so that light and dark themes both stay
readable; elsewhere the fallbacks hold.
"""

from __future__ import annotations

import html

from hivenb.system.safe_text import printable
from hivenb.view import theme

_CSS = """
.hivenb { font-family: var(--jp-ui-font-family, system-ui, sans-serif); max-width: 1400px; }
.hivenb .widget-html, .hivenb .widget-html-content, .hivenb .jupyter-widget-html-content
  { height: auto; line-height: 1.45; font-size: 13px; overflow: visible;
    color: var(--jp-ui-font-color1, inherit); }
.hivenb .widget-html > .widget-html-content { flex: 1 1 auto; min-width: 0; max-width: 100%; }
.hivenb-header { container-type: inline-size; }
.hivenb-facts
  { display: flex; flex-wrap: nowrap; align-items: baseline; gap: 2px 18px; overflow: hidden; white-space: nowrap;
    font-variant-numeric: tabular-nums; }
.hivenb-facts b { font-size: 15px; font-weight: 600; color: var(--jp-ui-font-color1, inherit); }
.hivenb-facts .dot
  { display: inline-block; width: 11px; height: 11px; border-radius: 50%; margin-right: 8px; }
.hivenb-facts .name { max-width: 18ch; overflow: hidden; text-overflow: ellipsis; }
.hivenb-facts .unit, .hivenb-note { color: var(--jp-ui-font-color2, #6b7280); }
@container (max-width: 760px) { .hivenb-facts { flex-wrap: wrap; min-height: 46px; } }
.hivenb-progress { display: flex; align-items: center; gap: 14px; }
.hivenb-progress .track
  { flex: 1 1 200px; height: 8px; border-radius: 4px; overflow: hidden;
    background: var(--jp-layout-color2, #e5e8ec); }
.hivenb-progress .done { height: 100%; border-radius: 4px; background: @SWARM; }
.hivenb-progress .words { flex: none; min-width: 220px; font-variant-numeric: tabular-nums; }
.hivenb-message { font-size: 12px; line-height: 22px; color: var(--jp-ui-font-color2, #6b7280); }
.hivenb-message summary { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; cursor: pointer; }
.hivenb-message div
  { padding: 0 12px; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--jp-ui-font-color1, inherit); }
.hivenb-message.wrong
  { border-left: 4px solid @VERMILLION; padding-left: 8px; color: var(--jp-ui-font-color1, inherit);
    background: var(--jp-layout-color2, #f3f4f6); }
.hivenb-trouble
  { border-left: 4px solid @VERMILLION; padding: 6px 12px; margin: 2px 0; white-space: pre-wrap;
    overflow-wrap: anywhere; background: var(--jp-layout-color2, #f3f4f6); }
.hivenb-note { font-size: 12px; }
.hivenb-heading
  { font-weight: 600; font-size: 12px; letter-spacing: .02em; margin-top: 4px;
    color: var(--jp-ui-font-color2, #6b7280); }
.hivenb-invite { display: flex; align-items: center; gap: 8px; min-width: 0; }
.hivenb-invite input
  { flex: 1 1 160px; min-width: 80px; height: 28px; box-sizing: border-box; padding: 0 8px; font-size: 12px;
    font-family: var(--jp-code-font-family, monospace); border: 1px solid var(--jp-border-color1, #bdbdbd);
    border-radius: 2px; text-overflow: ellipsis; background: var(--jp-layout-color1, #fff);
    color: var(--jp-ui-font-color1, #24292f); }
.hivenb-copy
  { height: 28px; padding: 0 12px; border: none; font-size: 13px; cursor: pointer;
    background: var(--jp-layout-color2, #eee); color: var(--jp-ui-font-color1, #24292f); }
.hivenb-copy:hover { box-shadow: 0 1px 3px rgba(0, 0, 0, .35); }
.hivenb-table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.hivenb-table th
  { font-weight: 600; color: var(--jp-ui-font-color2, #6b7280);
    border-bottom: 1px solid var(--jp-border-color2, #d7dbe0); }
.hivenb-table th, .hivenb-table td { padding: 3px 16px 3px 0; text-align: left; white-space: nowrap; }
.hivenb-table .name
  { display: inline-block; max-width: 22ch; overflow: hidden; text-overflow: ellipsis; vertical-align: bottom; }
.hivenb-table .number { text-align: right; }
.hivenb-table code { background: none; color: inherit; font-family: var(--jp-code-font-family, monospace); }
.hivenb .hivenb-compared { table-layout: auto; margin: 0; }
.hivenb .hivenb-compared th, .hivenb .hivenb-compared td { text-align: right; vertical-align: baseline; }
.hivenb .hivenb-compared .words { text-align: left; white-space: normal; min-width: 6em; }
.hivenb .hivenb-compared svg { display: block; min-width: 30px; max-width: none; }
[data-jp-theme-light="false"] .hivenb-compared svg { filter: invert(.93) hue-rotate(180deg); }
.hivenb-scroll { container-type: inline-size; overflow-x: auto; }
@container (max-width: 620px)
  { .hivenb-table .extra { display: none; } .hivenb-table th, .hivenb-table td { padding-right: 8px; }
    .hivenb-table td:last-child { white-space: normal; padding-right: 0; } }
.hivenb .widget-tab-contents, .hivenb .jupyter-widget-tab-contents { padding: 8px 10px; }
.hivenb-table .absent { opacity: .55; }
.hivenb-table .share
  { display: inline-block; height: 8px; border-radius: 4px; margin-right: 8px; background: @SWARM; }
.hivenb-log { max-height: 200px; overflow: auto; }
.hivenb pre
  { margin: 0; font-size: 12px; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere;
    font-family: var(--jp-code-font-family, monospace); background: none;
    color: var(--jp-ui-font-color1, inherit); }
.hivenb-code { display: flex; align-items: flex-start; justify-content: space-between; gap: 8px; }
.hivenb-code pre { flex: 1 1 auto; min-width: 0; max-height: 260px; overflow: auto; }
.hivenb-code .hivenb-copy { flex: none; }
.hivenb-helped
  { position: relative; --jp-widgets-inline-height: 24px; --jp-widgets-inline-margin: 1px; }
.hivenb-helped > .widget-html, .hivenb-helped > .widget-html > * { position: static; min-height: 0; }
.hivenb-help > summary
  { position: absolute; top: 5px; right: 2px; width: 16px; height: 16px; box-sizing: border-box; border-radius: 50%;
    border: 1px solid var(--jp-border-color1, #bdbdbd); font-size: 11px; line-height: 14px; text-align: center;
    list-style: none; cursor: help; color: var(--jp-ui-font-color2, #6b7280); }
.hivenb-help > summary::-webkit-details-marker { display: none; }
.hivenb-help > summary:hover, .hivenb-help[open] > summary
  { border-color: currentColor; color: var(--jp-ui-font-color1, inherit); }
.hivenb-help > div { padding: 0 24px 4px 2px; overflow-wrap: anywhere; }
.hivenb-choices .hivenb-helped { padding-right: 20px; }
.hivenb-choices .hivenb-help > div
  { position: absolute; z-index: 5; top: 26px; right: 0; width: 220px; padding: 4px 8px; border-radius: 4px;
    border: 1px solid var(--jp-border-color1, #bdbdbd); background: var(--jp-layout-color1, #fff); }
.hivenb-helped .hivenb-trouble { padding: 2px 8px; font-size: 12px; line-height: 1.35; }
.hivenb .hivenb-number { height: auto; align-items: center; }
.hivenb-number .widget-label
  { flex: 1 1 auto; width: auto; min-width: 0; height: auto; white-space: normal; line-height: 1.2; }
.hivenb-number input[type="text"] { flex: 0 0 72px; min-width: 72px; }
.hivenb-number.hivenb-wide input[type="text"] { flex-basis: 176px; }
.hivenb .widget-checkbox { display: flex; align-items: center; height: auto; min-height: 24px; }
.hivenb .widget-checkbox label { display: flex; align-items: center; white-space: normal; line-height: 1.3; }
.hivenb .widget-checkbox input[type="checkbox"] { margin: 0 8px 0 0; flex: none; }
.hivenb .widget-dropdown .widget-label, .hivenb .widget-text .widget-label { text-align: left; }
.hivenb .widget-dropdown .widget-label, .hivenb .widget-text .widget-label, .hivenb .widget-slider .widget-label
  { margin-right: 8px; }
.hivenb-low { --jp-widgets-inline-height: 24px; }
.hivenb .widget-tab > .lm-TabBar .lm-TabBar-tab, .hivenb .widget-tab > .p-TabBar .p-TabBar-tab
  { flex: 0 1 auto; min-width: 0; padding: 0 14px; }
.hivenb-marks .kind { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 8px; }
.hivenb .hivenb-marks .words { white-space: normal; overflow-wrap: anywhere; width: 100%; }
.hivenb.jupyter-widgets-disconnected::before
  { content: "The kernel behind this has ended, or was restarted: nothing here is up to date, and no button acts. "
    "Run the cells again."; display: block; position: static; padding: 6px 12px; margin: 0 0 4px 0; font-size: 13px;
    font-family: var(--jp-ui-font-family, system-ui, sans-serif); line-height: 1.45; white-space: normal;
    border-left: 4px solid @VERMILLION; background: var(--jp-layout-color2, #f3f4f6);
    color: var(--jp-ui-font-color1, #24292f); }
.hivenb .jupyter-widgets-disconnected::before { content: none; }
.hivenb img { max-width: 100%; height: auto; border-radius: 4px; }
.hivenb .hivenb-unseen { display: none; }
.hivenb .hivenb-picture { position: relative; overflow: visible; }
.hivenb-picture > [hidden] { display: none; }
.hivenb-hair, .hivenb-chosen, .hivenb-dot, .hivenb-tip { position: absolute; pointer-events: none; }
.hivenb-hair { width: 1px; opacity: .4; background: var(--jp-ui-font-color2, #6b7280); }
.hivenb-chosen { opacity: .25; background: @SWARM; }
.hivenb-dot
  { width: 6px; height: 6px; margin: -5px 0 0 -5px; border: 2px solid; border-radius: 50%;
    background: var(--jp-layout-color0, #fff); }
.hivenb-tip
  { z-index: 9; width: max-content; max-width: 320px; padding: 6px 10px; border-radius: 4px; font-size: 12px;
    line-height: 1.45; overflow-wrap: anywhere; box-shadow: 0 2px 8px rgba(0, 0, 0, .35);
    background: var(--jp-layout-color1, #fff); color: var(--jp-ui-font-color1, #24292f); }
.hivenb-tip div { display: flex; align-items: baseline; gap: 7px; }
.hivenb-tip i { flex: none; width: 9px; height: 9px; border-radius: 50%; }
.hivenb-tip b { margin-left: auto; padding-left: 14px; font-variant-numeric: tabular-nums; }
.hivenb-tip .hivenb-tip-place { font-weight: 600; margin-left: -16px; padding-left: 0; }
.hivenb-whole
  { position: absolute; transform: translateX(-50%); padding: 0 10px; border: none; border-radius: 2px;
    font-size: 12px; line-height: 19px; cursor: pointer; background: var(--jp-layout-color2, #eee);
    color: var(--jp-ui-font-color1, #24292f); }
[data-jp-theme-light="false"] .hivenb img:not(.hivenb-dark),
[data-jp-theme-light="false"] .hivenb img:not(.hivenb-dark) ~ .hivenb-tip i,
[data-jp-theme-light="false"] .hivenb img:not(.hivenb-dark) ~ .hivenb-dot { filter: invert(.93) hue-rotate(180deg); }
"""

# Clipboard access needs a secure page; the older command works wherever text can be selected.
_COPY = (
    "const box = this.previousElementSibling, text = box.value ?? box.textContent;"
    "const old = () => { const area = document.createElement('textarea'); area.value = text;"
    " document.body.append(area); area.select(); document.execCommand('copy'); area.remove(); };"
    "if (navigator.clipboard) { navigator.clipboard.writeText(text).catch(old); } else { old(); }"
    "this.textContent = 'Copied'; setTimeout(() => { this.textContent = 'Copy'; }, 1500);"
)


def sheet() -> str:
    """The style sheet as an HTML element; it concerns nothing outside of the class ``hivenb``."""
    css = _CSS
    for name in ("SWARM", "VERMILLION"):
        css = css.replace(f"@{name}", getattr(theme, name))
    return f"<style>{css}</style>"


def safe(text: object) -> str:
    """Text that came from elsewhere, harmless in HTML and in its attributes."""
    return html.escape(printable(str(text)), quote=True)


def copy_button(tooltip: str) -> str:
    """A button that copies the text of the element before it."""
    return f'<button class="hivenb-copy" title="{safe(tooltip)}" onclick="{safe(_COPY)}">Copy</button>'


def trouble(text: str) -> str:
    """An error in words; empty for none."""
    return f'<div class="hivenb-trouble" role="alert">{safe(text)}</div>' if text else ""


def message(text: str, is_trouble: bool = False) -> str:
    """A message of one line, of which a click unfolds what has no room in it; empty for none."""
    if not text:
        return ""
    role, kind = ("alert", " wrong") if is_trouble else ("status", "")
    return (
        f'<details class="hivenb-message{kind}" role="{role}" data-lm-suppress-shortcuts="true">'
        f'<summary title="{safe(text)}">{safe(" ".join(text.split()))}</summary><div>{safe(text)}</div></details>'
    )


def note(text: str) -> str:
    """A sentence that explains, in a quieter colour."""
    return f'<div class="hivenb-note">{safe(text)}</div>'


def heading(text: str) -> str:
    """The title of a group of switches."""
    return f'<div class="hivenb-heading">{safe(text)}</div>'
