// Sorts and filters the table of heads. Without it the table is complete and in the order of the layers.
(() => {
  "use strict";
  const table = document.getElementById("heads");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const headers = Array.from(table.tHead.rows[0].cells);

  const read = (cell) => {
    const text = cell.dataset.v ?? cell.textContent.replaceAll(",", "").replace("−", "-");
    const value = text === "" || text === "–" ? NaN : Number(text);
    return Number.isNaN(value) ? (text === "–" || text === "" ? null : text) : value;
  };

  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  };

  const sortBy = (index, descending) => {
    const keyed = rows.map((row, place) => ({ row, place, key: read(row.cells[index]) }));
    keyed.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.place - b.place;
      return (descending ? -1 : 1) * compare(a.key, b.key) || a.place - b.place;
    });
    body.append(...keyed.map((item) => item.row));
    headers.forEach((header, i) => {
      if (i === index) header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
  };

  headers.forEach((header, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const now = header.getAttribute("aria-sort");
      sortBy(index, now ? now === "ascending" : index > 0);
    });
  });

  const find = document.getElementById("find");
  const regime = document.getElementById("regime");
  const shown = document.getElementById("shown");
  const filter = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const name = row.cells[0].textContent.toLowerCase();
      const hit = words.every((word) => name.includes(word)) && (!regime.value || row.dataset.regime === regime.value);
      row.hidden = !hit;
      count += hit;
    }
    shown.textContent = `${count.toLocaleString("en")} of ${rows.length.toLocaleString("en")} heads`;
  };
  find.addEventListener("input", filter);
  regime.addEventListener("change", filter);
  document.getElementById("tools").hidden = false;
  filter();
})();
