// Tables are sorted by the column of the heading that is clicked: numbers by value, other cells by text.
// Cells without a value stay at the end in either order.
function cellValue(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replace("< ", "").replace(/,(?=\d{3})/g, ""));
  return Number.isNaN(number) ? text : number;
}
function compareValues(a, b, sign) {
  const missing = (value) => value === "" || value === "-";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return sign * a.localeCompare(b);
}
function sortBy(table, column, descending) {
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const sign = descending ? -1 : 1;
  rows.sort((a, b) => compareValues(cellValue(a, column), cellValue(b, column), sign));
  body.append(...rows);
}
document.querySelectorAll("article table").forEach((table) => {
  if (!table.tHead || table.tBodies.length !== 1) return;
  Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
    heading.style.cursor = "pointer";
    heading.title = "Sort by this column";
    heading.addEventListener("click", () => {
      const descending = heading.dataset.order !== "descending";
      heading.dataset.order = descending ? "descending" : "ascending";
      sortBy(table, column, descending);
    });
  });
});
