"use strict";

(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 600px)");
  const shared = ["memory", "streams"];
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
      "margin.t": id === "streams" ? 4 : 24,
      "margin.b": id === "memory" ? 8 : 48,
      "modebar.color": line,
      "modebar.activecolor": text,
      "modebar.bgcolor": "rgba(0,0,0,0)",
    };
    for (const axis of ["xaxis", "yaxis"]) {
      layout[`${axis}.gridcolor`] = line;
      layout[`${axis}.linecolor`] = line;
      layout[`${axis}.zerolinecolor`] = line;
      // Memory and streams stand below each other, with one time axis: their margins are the same.
      layout[`${axis}.automargin`] = axis === "xaxis" || !shared.includes(id);
    }
    return layout;
  }

  function draw() {
    for (const [id, figure] of Object.entries(figures)) {
      // Buttons above the streams would lie on memory, whose buttons do the same.
      const buttons = id === "streams" ? { displayModeBar: false } : {};
      Plotly.newPlot(id, figure.data, figure.layout, { ...config, ...buttons }).then(() => Plotly.relayout(id, looks(id)));
    }
    follow(...shared);
    follow(...shared.toReversed());
  }

  // Shows the same part of the time axis as another figure.
  function follow(leader, id) {
    const [plot, other] = [leader, id].map((each) => document.getElementById(each));
    plot.on("plotly_relayout", () => {
      const { range } = plot.layout.xaxis;
      if (range.some((value, place) => value !== other.layout.xaxis.range[place])) {
        Plotly.relayout(id, { "xaxis.range": [...range] });
      }
    });
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
    const { axes, static: below } = figures.memory.layout.meta;
    const { range, title } = axes[Number(pressed)];
    Plotly.update("memory", {}, { "yaxis.range": [...range], "yaxis.title.text": title });
    if (below.length) {
      Plotly.restyle("memory", { showlegend: !pressed }, below);
    }
  });

  // Each block is a body of the table: its row, and the row of its operators once opened. Blocks of one kind are the
  // members that follow the body of their kind.
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
      const isMember = (body) => body.classList.contains("member");
      const membersOf = (top) => bodies.filter((body) => isMember(body) && body.dataset.kind === top.dataset.kind);
      table.append(...bodies.filter((body) => !isMember(body)).flatMap((top) => [top, ...membersOf(top)]));
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
    if (button.dataset.opens) {
      for (const member of table.querySelectorAll(`tbody.member[data-kind="${body.dataset.kind}"]`)) {
        member.hidden = opened;
      }
      return;
    }
    if (opened) {
      body.rows[1].remove();
      return;
    }
    body.append(document.getElementById(button.dataset.operators).content.cloneNode(true));
    body.rows[1].querySelector(".why").textContent = body.rows[0].lastElementChild.dataset.value;
    body.rows[1].querySelector(".module code").textContent = body.rows[0].cells[0].dataset.value;
    body.rows[1].id = button.getAttribute("aria-controls");
  });

  label();
  draw();
})();
