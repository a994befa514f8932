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

  // What of the cases is shown: of each group those of a capability, of all those that are sought.
  const groups = [...document.querySelectorAll("details.group")];
  const chosen = new Map();
  const find = document.querySelector(".find");
  const search = find && find.querySelector("[type=search]");
  const red = find && find.querySelector("[type=checkbox]");
  const texts = new WeakMap();

  const textOf = (row) => {
    if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
    return texts.get(row);
  };

  const filter = () => {
    const words = search ? search.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
    const sought = words.length > 0 || (red !== null && red.checked);
    let found = 0;
    let all = 0;
    for (const group of groups) {
      const only = chosen.get(group);
      const rows = group.querySelectorAll("tbody tr");
      let shown = 0;
      for (const row of rows) {
        const wanted =
          (!only || row.dataset.about.split(" ").includes(only.capability)) &&
          (!red || !red.checked || "red" in row.dataset) &&
          words.every((word) => textOf(row).includes(word));
        row.hidden = !wanted;
        shown += wanted;
      }
      const bar = group.querySelector(".filter");
      bar.hidden = !only;
      if (only) bar.querySelector("span").textContent = `${shown} of ${rows.length} cases: ${only.name}`;
      group.hidden = sought && shown === 0;
      if (sought && shown > 0) group.open = true;
      found += shown;
      all += rows.length;
    }
    if (find) {
      find.querySelector("[role=status]").textContent = sought ? `${found} of ${all} cases` : "";
      find.querySelector("a").hidden = !sought;
    }
  };

  if (find) {
    find.hidden = false;
    search.addEventListener("input", filter);
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") document.getElementById("cases").scrollIntoView();
    });
    red.addEventListener("change", filter);
  }

  // A link opens what is folded around its target.
  const open = (hash) => {
    const target = hash ? document.getElementById(hash.slice(1)) : null;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    return target;
  };
  open(location.hash)?.scrollIntoView();

  // A table that fits scrolls with the page, so that its headings stay in sight.
  const fit = () => {
    for (const box of document.querySelectorAll(".box")) {
      box.classList.remove("whole");
      if (box.clientWidth && box.scrollWidth <= box.clientWidth) box.classList.add("whole");
    }
  };
  fit();
  addEventListener("resize", fit);
  document.addEventListener("toggle", fit, true);

  for (const command of document.querySelectorAll("pre.rerun")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(command.textContent.trim());
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(command);
        button.textContent = "Selected: press Ctrl-C";
      }
    });
    command.before(button);
  }

  document.addEventListener("click", (event) => {
    const inside = event.target.closest('a[href^="#"]');
    if (inside) open(inside.hash);
    const link = event.target.closest("a[data-about]");
    if (link) {
      const table = document.getElementById(link.hash.slice(1));
      const group = table.closest("details");
      if (search) search.value = "";
      if (red) red.checked = false;
      chosen.set(group, { capability: link.dataset.about, name: link.dataset.name });
      filter();
      group.open = true;
      return;
    }
    const button = event.target.closest(".filter button");
    if (button && chosen.delete(button.closest("details"))) filter();
  });
})();
