"use strict";

// Tables sort by a click on a heading: numbers by size, text as people order it, missing values last either way.
function compare(one, other, sign) {
  const [a, b] = [one, other].map((cell) => ("value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent));
  const [missingA, missingB] = [Number.isNaN(a), Number.isNaN(b)];
  if (missingA || missingB) return missingA - missingB;
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  headings.forEach((heading, index) => {
    heading.firstElementChild.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const sign = descending ? -1 : 1;
      body.append(...[...body.rows].sort((a, b) => compare(a.cells[index], b.cells[index], sign)));
    });
  });
}

// Downloads: the data of a block as the page holds it, or the same as CSV (RFC 4180).
function csv(records) {
  const names = [...new Set(records.flatMap(Object.keys))];
  const quote = (value) => {
    const text = String(value ?? "");
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [names, ...records.map((record) => names.map((name) => record[name]))]
    .map((row) => row.map(quote).join(",") + "\r\n")
    .join("");
}

function download(data, format) {
  const text = format === "csv" ? csv(JSON.parse(data.textContent)) : data.textContent;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: format === "csv" ? "text/csv" : "application/json" }));
  link.download = `${data.dataset.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-")}.${format}`;
  link.click();
  URL.revokeObjectURL(link.href);
}

for (const offer of document.querySelectorAll(".downloads")) {
  offer.hidden = false;
  for (const button of offer.querySelectorAll("button")) {
    button.addEventListener("click", () => download(offer.nextElementSibling, button.dataset.format));
  }
}

// Tooltips: each mark's <title>, at once and for a touch too, in place of the browser's own.
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;
for (const title of document.querySelectorAll(".chart title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
document.addEventListener("pointermove", (event) => {
  const mark = event.target.closest?.("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = event.clientY - tip.offsetHeight - 12;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above < 8 ? event.clientY + 20 : above}px`;
});
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
