"use strict";
(() => {
  const collator = new Intl.Collator("en", { numeric: true });

  const sort = (table, column, ascending) => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const told = rows.map((row) => {
      const cell = row.cells[column];
      return (cell.dataset.v ?? cell.textContent).trim();
    });
    const numbers = told.map((text) => parseFloat(text.replace(/,/g, "")));
    const known = told.map((text) => text !== "" && text !== "-");
    const numeric = told.every((_, at) => !known[at] || !Number.isNaN(numbers[at]));
    const order = rows.map((_, at) => at);
    order.sort((a, b) => {
      if (known[a] !== known[b]) return known[a] ? -1 : 1;
      const by = numeric ? numbers[a] - numbers[b] || 0 : collator.compare(told[a], told[b]);
      return (ascending ? by : -by) || a - b;
    });
    body.append(...order.map((at) => rows[at]));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (head.classList.contains("unsorted")) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const ascending = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        sort(table, column, ascending);
      });
    });
  }

  const show = (group, capability, name) => {
    const bar = group.querySelector(".filter");
    let shown = 0;
    const rows = group.querySelectorAll("tbody tr");
    for (const row of rows) {
      const wanted = capability === null || row.dataset.about.split(" ").includes(capability);
      row.hidden = !wanted;
      shown += wanted;
    }
    bar.hidden = capability === null;
    bar.querySelector("span").textContent = `${shown} of ${rows.length} cases: ${name}`;
  };

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-about]");
    if (link) {
      const table = document.getElementById(link.hash.slice(1));
      const group = table.closest("details");
      group.open = true;
      show(group, link.dataset.about, link.dataset.name);
      return;
    }
    const button = event.target.closest(".filter button");
    if (button) show(button.closest("details"), null, "");
  });
})();
