// Tables are sorted by the column whose heading is clicked: numbers by value, other cells by text.
function cellValue(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replace("< ", ""));
  return Number.isNaN(number) ? text : number;
}
function compareValues(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return a.localeCompare(b);
}
function sortBy(table, column, descending) {
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  rows.sort((a, b) => compareValues(cellValue(a, column), cellValue(b, column)) * (descending ? -1 : 1));
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
