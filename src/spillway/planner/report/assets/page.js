"use strict";

(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 600px)");
  const theme = document.getElementById("theme");
  const config = {
    responsive: true,
    displaylogo: false,
    // This page sends nothing, and plotly would offer to send a figure to its maker's server.
    showSendToCloud: false,
    plotlyServerURL: "",
    displayModeBar: narrow.matches ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d"],
  };

  // A figure's colours and margins.
  function looks(id) {
    const style = getComputedStyle(root);
    const text = style.getPropertyValue("--text").trim();
    const line = style.getPropertyValue("--line").trim();
    const raised = style.getPropertyValue("--raised").trim();
    const small = narrow.matches;
    const layout = {
      "paper_bgcolor": "rgba(0,0,0,0)",
      "plot_bgcolor": "rgba(0,0,0,0)",
      "font.color": text,
      "font.size": small ? 11 : 13,
      "font.family": getComputedStyle(document.body).fontFamily,
      "hoverlabel.bgcolor": raised,
      "hoverlabel.bordercolor": line,
      "hoverlabel.font.color": text,
      "hoverlabel.align": "left",
      "margin.l": small ? 58 : 76,
      "margin.r": small ? 8 : 20,
      "margin.t": 24,
      "margin.b": 48,
      "modebar.color": line,
      "modebar.activecolor": text,
      "modebar.bgcolor": "rgba(0,0,0,0)",
    };
    for (const axis of ["xaxis", "yaxis"]) {
      layout[`${axis}.gridcolor`] = line;
      layout[`${axis}.linecolor`] = line;
      layout[`${axis}.zerolinecolor`] = line;
      layout[`${axis}.automargin`] = true;
    }
    return layout;
  }

  function draw() {
    for (const [id, figure] of Object.entries(figures)) {
      Plotly.newPlot(id, figure.data, figure.layout, config).then(() => Plotly.relayout(id, looks(id)));
    }
  }

  function redraw() {
    for (const id of Object.keys(figures)) {
      Plotly.relayout(id, looks(id));
    }
  }

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }

  function label() {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", isDark() ? "Change to light colours" : "Change to dark colours");
  }

  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
    redraw();
  });
  dark.addEventListener("change", () => {
    label();
    redraw();
  });
  narrow.addEventListener("change", redraw);

  // Static memory can fill most of the figure.
  const closer = document.getElementById("closer");
  closer.addEventListener("click", () => {
    const pressed = closer.getAttribute("aria-pressed") !== "true";
    closer.setAttribute("aria-pressed", String(pressed));
    const [, top] = figures.memory.layout.yaxis.range;
    const { ground } = figures.memory.layout.meta;
    Plotly.relayout("memory", { "yaxis.range": pressed ? [ground - 0.02 * (top - ground), top] : [0, top] });
  });

  // Each block is a body of the table: its row, and the row of its operators once opened.
  const table = document.getElementById("blocks");
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, place) => {
    const button = heading.querySelector("button");
    if (!button) {
      return;
    }
    button.addEventListener("click", () => {
      const falls = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const value = (body) => body.rows[0].cells[place].dataset.value;
      const byNumber = heading.classList.contains("number");
      const compare = (a, b) => byNumber ? Number(value(a)) - Number(value(b))
        : value(a).localeCompare(value(b), "en", { numeric: true });
      const bodies = [...table.tBodies].sort((a, b) => falls ? compare(b, a) : compare(a, b));
      table.append(...bodies);
    });
  });

  table.addEventListener("click", (event) => {
    const button = event.target.closest("button[aria-expanded]");
    if (!button) {
      return;
    }
    const body = button.closest("tbody");
    const opened = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!opened));
    if (opened) {
      body.rows[1].remove();
      return;
    }
    body.append(document.getElementById(button.dataset.operators).content.cloneNode(true));
    body.rows[1].querySelector(".why").textContent = body.rows[0].lastElementChild.dataset.value;
    body.rows[1].id = button.getAttribute("aria-controls");
  });

  label();
  draw();
})();
