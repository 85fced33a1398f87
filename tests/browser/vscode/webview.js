// The web view of a notebook in VS Code: the widget manager of Microsoft's package, with a kernel that is not there.
//
// Written after https://github.com/microsoft/vscode-jupyter, src/webviews/webview-side/ipywidgets: a KernelConnection of
// JupyterLab's, whose socket hands messages from and to the editor around it; it has no subshells, and asks the kernel
// for no widgets that were made before it.
import { ServerConnection } from "@jupyterlab/services";
import { KernelConnection } from "@jupyterlab/services/lib/kernel/default";

const VIEW = "application/vnd.jupyter.widget-view+json";
const toHost = (message) => parent.postMessage(message, location.origin);
const shown = new Map();  // by the ids of outputs: where, which model, and the widget
const announced = new Map();  // by model ids: a promise of the kernel's word that it is to be seen
let kernel = null, manager = null, socket = null;

class Socket {
  constructor() { socket = this; }
  send(data) { toHost({ type: "say", data }); }
  close() {}
}

const announcement = (model) => {
  if (!announced.has(model)) {
    const entry = {};
    entry.promise = new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
    entry.promise.catch(() => {});
    announced.set(model, entry);
  }
  return announced.get(model);
};

const connect = ({ clientId, username, model, protocol }) => {
  Socket.prototype.protocol = protocol;
  const serverSettings = ServerConnection.makeSettings({ WebSocket: Socket, wsUrl: "nowhere" });
  kernel = new KernelConnection({ serverSettings, clientId, username, model, handleComms: true });
  // The kernel has been asked already what it is; nobody asks again.
  const ask = kernel.requestKernelInfo;
  kernel.requestKernelInfo = () => Promise.resolve();
  socket.onopen({ target: socket });
  kernel.requestKernelInfo = ask;
  const scripts = {
    widgetsRegisteredInRequireJs: new Set(),
    errorHandler: (name, module, version, error) => console.error(`no widget ${module} ${version} ${name}: ${error}`),
    loadWidgetScript: async () => {},
    successHandler: () => {},
  };
  manager = new window.vscIPyWidgets.WidgetManager(kernel, undefined, scripts, () => {});
  kernel.iopubMessage.connect((_, { header, content }) => {
    const kinds = ["display_data", "update_display_data", "execute_result"];
    if (!kinds.includes(header.msg_type) || !content.data[VIEW]) return;
    const { resolve, reject } = announcement(content.data[VIEW].model_id);
    manager.get_model(content.data[VIEW].model_id).then(resolve, reject);
  });
};

const show = async ({ output, model }) => {
  const before = shown.get(output);
  if (before?.place.isConnected && before.model === model.model_id) return;
  const place = document.createElement("div");
  place.className = "output cell-output-ipywidget-background";
  document.querySelector("#container").append(place);
  const now = { place, model: model.model_id, widget: null };
  shown.set(output, now);
  const known = await manager.get_model(model.model_id).catch(() => null);
  if (!known) await announcement(model.model_id).promise;
  const view = await manager.create_view(await manager.get_model(model.model_id), { el: place });
  now.widget = await manager.display_view({}, view, { node: place });
};

const hide = ({ output }) => {
  const before = shown.get(output);
  before?.widget?.dispose();
  before?.place.remove();
  shown.delete(output);
};

const fromHost = {
  kernel: connect,
  said: ({ data }) => socket?.onmessage?.({ target: socket, data }),
  show: (message) => show(message).catch((error) => console.error(`output not shown: ${error}`)),
  hide,
};
window.addEventListener("message", (event) => fromHost[event.data.type]?.(event.data));

// A link to data is no download in VS Code: the editor asks where to save it.
document.body.addEventListener("click", (event) => {
  const link = event.composedPath().find((node) => node instanceof HTMLAnchorElement && node.href);
  if (!link) return;
  event.preventDefault();
  if (link.href.startsWith("data:")) toHost({ type: "save", name: link.download, data: link.href });
});

window.vscIPyWidgets8.load();
toHost({ type: "ready" });
